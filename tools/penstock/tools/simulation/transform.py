"""What is done to a trace before it is replayed: windows, load, caps, tenants, deadlines.

Owns the order of these changes: window, cap, tenant and deadline, then load. Streams.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.server.recording.trace import (
    MAX_ARRIVAL_S,
    TraceError,
    TraceRequest,
    check_unique,
)
from penstock.tools.simulation.synthetic import TenantChoice, TenantShare

MIN_LOAD, MAX_LOAD = 1e-6, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformConfig:
    """Changes to a trace. Raises ValueError naming the field.

    `load`: arrivals come so many times faster; lengths and deadlines stay. `start_s`, `end_s`: the
    part of the trace that is kept, in the trace's own time; the kept part begins at 0. `tenants`:
    who the requests are given to, in place of what the trace says. `deadline_share`: the part of
    the requests that carry the deadlines given here (seconds after arrival).
    """

    load: float = 1.0
    start_s: float = 0.0
    end_s: float = math.inf
    max_requests: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    tenants: tuple[TenantShare, ...] = ()
    ttft_deadline_s: float = math.inf
    deadline_s: float = math.inf
    deadline_share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not MIN_LOAD <= self.load <= MAX_LOAD:
            raise ValueError(f"load must be in {MIN_LOAD:g} .. {MAX_LOAD:g}, not {self.load}")
        check_unique("tenants", (tenant.name for tenant in self.tenants))
        if not 0.0 <= self.start_s < self.end_s:
            raise ValueError("start_s must not be negative and must be before end_s")
        for name in ("max_requests", "max_prompt_tokens", "max_output_tokens"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("ttft_deadline_s", "deadline_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0.0 <= self.deadline_share <= 1.0:
            raise ValueError(f"deadline_share must be in [0, 1], not {self.deadline_share}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")


def transformed(trace: Iterable[TraceRequest], config: TransformConfig) -> Iterator[TraceRequest]:
    """The trace with the changes applied."""
    # Two streams, so that giving out tenants does not move who has a deadline.
    choose = TenantChoice(config.tenants, np.random.default_rng([config.seed, 1]))
    random = np.random.default_rng([config.seed, 2])
    for index, request in enumerate(_windowed(trace, config)):
        if index == config.max_requests:
            return
        is_urgent = random.random() < config.deadline_share
        capped = _capped(request, config)
        arrival_s = (request.arrival_s - config.start_s) / config.load
        if arrival_s > MAX_ARRIVAL_S:
            raise TraceError(
                f"load must be greater: with {config.load:g} a request arrives after {arrival_s:g}"
                f" s, and {MAX_ARRIVAL_S:g} is the most"
            )
        yield replace(
            capped,
            arrival_s=arrival_s,
            tenant=choose() if config.tenants else request.tenant,
            ttft_deadline_s=min(
                request.ttft_deadline_s, config.ttft_deadline_s if is_urgent else math.inf
            ),
            deadline_s=min(request.deadline_s, config.deadline_s if is_urgent else math.inf),
        )


def merged(*traces: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Several traces as one, in order of arrival."""
    return heapq.merge(*traces, key=_arrival_s)


def _arrival_s(request: TraceRequest) -> float:
    return request.arrival_s


def _windowed(trace: Iterable[TraceRequest], config: TransformConfig) -> Iterator[TraceRequest]:
    for request in trace:
        if request.arrival_s >= config.end_s:
            return
        if request.arrival_s >= config.start_s:
            yield request


def _capped(request: TraceRequest, config: TransformConfig) -> TraceRequest:
    num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
    num_prompt = min(num_prompt, config.max_prompt_tokens or num_prompt)
    num_output = min(num_output, config.max_output_tokens or num_output)
    if (num_prompt, num_output) == (request.num_prompt_tokens, request.num_output_tokens):
        return request
    num_ids = -(-num_prompt // request.prefix_block_tokens)
    return replace(
        request,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        prefix_ids=request.prefix_ids[:num_ids],
    )
