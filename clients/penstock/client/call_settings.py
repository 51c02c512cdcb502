"""The settings of a client, and what they determine for each call: metadata and attempts.

Also checks arguments of calls. Shared by the asyncio and the blocking client. Does no I/O.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

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
"""Deadline of calls that do not generate, in seconds."""

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_WATCH_METHOD = "/grpc.health.v1.Health/Watch"

MAX_NUM_PAGES = 1000
"""Maximum number of pages that `list_models` and `list_requests` read, in case a faulty server
never sends a last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Settings of all calls of a client. Tests replace the clock and the random numbers.

    Attributes:
        retry: When failed calls are retried.
        metadata: Pairs of key and value, for all calls. If one has the key `authorization`, `token`
            is not sent.
        token: Bearer token, or a function that returns it; None for no token.
        clock: Returns monotonic time in seconds.
        random: Returns a random number in [0, 1).
        budget: Limits retries to a share of the client's calls.
    """

    retry: RetryPolicy
    metadata: Pairs = ()
    token: Token | None = field(default=None, repr=False)
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random
    budget: RetryBudget = field(default_factory=RetryBudget)

    def attempts(self, deadline_s: float | None) -> Attempts:
        """Return a new `Attempts` for one logical call, i.e. for all its gRPC calls. Raises
        ValueError or TypeError for an invalid `deadline_s`."""
        return Attempts(
            self.retry,
            deadline_s=deadline_s,
            clock=self.clock,
            random=self.random,
            budget=self.budget,
        )

    def recovery(self, resume_timeout_s: float) -> Recovery:
        """Return an object that tracks the lost connections of one stream.

        After each loss the stream can be resumed for `resume_timeout_s` seconds. If that is 0,
        the first loss is raised as an error.
        """
        return Recovery(resume_timeout_s, clock=self.clock, random=self.random)

    def call_metadata(self, metadata: Metadata, trace: TraceContext | None) -> Pairs:
        """Return the metadata of one call: the token, the client's metadata, `metadata`, and the
        trace context.

        If `trace` is None, the current OpenTelemetry context is propagated, unless the metadata
        already contains a `traceparent`. Raises TypeError for invalid `metadata`, ValueError for an
        invalid token, and the errors of a token function.
        """
        pairs = self.shared_metadata(metadata)
        if trace is None and not any(key == "traceparent" for key, _ in pairs):
            trace = current_trace_context()
        return (*pairs, *trace.metadata()) if trace is not None else pairs

    def shared_metadata(self, metadata: Metadata = ()) -> Pairs:
        """Same as `call_metadata`, but without a trace context, because the requests of a Multiplex
        call may belong to different traces."""
        pairs = (*self.metadata, *metadata_pairs(metadata))
        if self.token is None or any(key == "authorization" for key, _ in pairs):
            return pairs
        return (authorization(self.token), *pairs)


def metadata_pairs(metadata: Metadata) -> Pairs:
    """Return the metadata as a tuple. Raises TypeError if it is not a sequence of pairs."""
    pairs: tuple[object, ...] = () if isinstance(metadata, str | Mapping) else tuple(metadata)
    if len(pairs) != len(metadata) or not all(map(_is_pair, pairs)):
        raise TypeError('metadata: must be pairs of key and value: (("x-tenant", "a"), ...)')
    return cast("Pairs", pairs)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(cast("Sequence[object]", value)) == 2


def traceparent_of(metadata: Pairs) -> str | None:
    """Return the `traceparent` in the metadata, or None. If there are several, the last one is
    returned."""
    return dict(metadata).get("traceparent")


def require_no_metadata(metadata: Metadata) -> None:
    """Raise ValueError if `metadata` is not empty, because a multiplexed request cannot have
    metadata; only the shared call has it."""
    if metadata:
        raise ValueError("metadata: a multiplexed request has no metadata; set it on the client")


def require_one_output(request: GenerationRequest) -> None:
    """Raise ValueError if `n` is set to anything but 1, because several outputs would be mixed into
    one text."""
    if request.sampling.n not in (None, 1):
        raise ValueError(f"n: a stream of text has one output, not {request.sampling.n}")
