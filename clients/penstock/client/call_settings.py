"""Decisions of both clients before a call: metadata, attempts, limits.

Owns the settings common to the async and the blocking client. Does no I/O.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.client.credentials import Token, authorization
from penstock.client.options import GenerationRequest
from penstock.client.resuming import Recovery
from penstock.client.retry import Attempts, RetryPolicy
from penstock.client.retry_budget import RetryBudget
from penstock.client.trace_context import TraceContext, current_trace_context

Metadata: TypeAlias = Sequence[tuple[str, str]]
Pairs: TypeAlias = tuple[tuple[str, str], ...]
"""Metadata to send, immutable."""

CONTROL_DEADLINE_S = 10.0
"""Deadline of calls that do not generate, seconds."""

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_WATCH_METHOD = "/grpc.health.v1.Health/Watch"

MAX_NUM_PAGES = 1000
"""Most pages that `list_models` reads, for a server whose pages never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What a client sends with every call, and its sources of time and random numbers, for tests.

    Attributes:
        retry: When failed calls are retried.
        metadata: Pairs of key and value; with an `authorization`, `token` is not sent.
        token: Bearer token, or a function that returns it.
        clock: Monotonic time in seconds.
        random: Random numbers from 0 to 1.
        budget: Limits retries to a share of the client's calls.
    """

    retry: RetryPolicy
    metadata: Pairs = ()
    token: Token | None = field(default=None, repr=False)
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random
    budget: RetryBudget = field(default_factory=RetryBudget)

    def attempts(self, deadline_s: float | None) -> Attempts:
        """Return the attempts of one logical call. Raises ValueError for a bad `deadline_s`."""
        return Attempts(
            self.retry,
            deadline_s=deadline_s,
            clock=self.clock,
            random=self.random,
            budget=self.budget,
        )

    def recovery(self, grace_s: float) -> Recovery:
        """Return the tracker of one stream's losses; `grace_s` 0: losses are raised."""
        return Recovery(grace_s, clock=self.clock, random=self.random)

    def call_metadata(self, metadata: Metadata, trace: TraceContext | None) -> Pairs:
        """Return the metadata of one call: that of the client and of the call, and its trace.

        Without an explicit `trace` the current OpenTelemetry context is propagated, unless the
        metadata contains a trace already.
        """
        pairs = self.shared_metadata(metadata)
        if trace is None and not any(key == "traceparent" for key, _ in pairs):
            trace = current_trace_context()
        return (*pairs, *trace.metadata()) if trace is not None else pairs

    def shared_metadata(self, metadata: Metadata = ()) -> Pairs:
        """Return the metadata of a call that does not belong to a single trace. Raises ValueError
        for an invalid token.
        """
        pairs = (*self.metadata, *metadata)
        if self.token is None or any(key == "authorization" for key, _ in pairs):
            return pairs
        return (authorization(self.token), *pairs)


def traceparent_of(metadata: Pairs) -> str | None:
    """Return the `traceparent` in the metadata, the last one of several; None if there is none."""
    return dict(metadata).get("traceparent")


def require_no_metadata(metadata: Metadata) -> None:
    """Raise ValueError for metadata of a multiplexed request: only the shared call has metadata."""
    if metadata:
        raise ValueError("metadata: a multiplexed request has no metadata; give it to the client")


def require_one_output(request: GenerationRequest) -> None:
    """Raise ValueError when several outputs would be mixed into one text."""
    if request.sampling.n not in (None, 1):
        raise ValueError(f"n: a stream of text has one output, not {request.sampling.n}")
