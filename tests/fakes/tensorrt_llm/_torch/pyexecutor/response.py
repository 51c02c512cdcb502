"""The result of one step for one request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from tensorrt_llm._torch.pyexecutor.llm_request import FinishReason, LlmRequest


@dataclass(frozen=True, slots=True)
class TimingMetrics:
    """Times on the steady clock."""

    arrival_time: timedelta
    first_scheduled_time: timedelta
    first_token_time: timedelta
    last_token_time: timedelta


@dataclass(frozen=True, slots=True)
class RequestPerfMetrics:
    """Present only with `return_perf_metrics`."""

    timing_metrics: TimingMetrics


@dataclass(slots=True)
class Response:
    """New tokens of one request, or its end, or its error.

    `error`: a string if the request failed, an exception if the engine failed.
    """

    client_id: int
    tokens: list[int]
    is_final: bool
    finish: FinishReason = FinishReason.NOT_FINISHED
    logprobs: list[dict[int, tuple[float, int]]] | None = None
    cumulative_logprob: float = 0.0
    cached_tokens: int = 0
    iteration: int = 0
    perf_metrics: RequestPerfMetrics | None = None
    error: str | BaseException | None = None


def perf_metrics(request: LlmRequest) -> RequestPerfMetrics:
    """Return metrics of a request that ends now; without a token, its end is its
    first-token time."""
    now_s = time.monotonic()
    first_s = now_s if request.first_token_at_s is None else request.first_token_at_s
    arrival = timedelta(seconds=request.arrived_at_s)
    return RequestPerfMetrics(
        TimingMetrics(arrival, arrival, timedelta(seconds=first_s), timedelta(seconds=now_s))
    )
