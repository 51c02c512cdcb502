"""The account of one request, from its arrival to its record.

Owns what is known before the front has opened a request, and its outcome; the rest belongs to its
`LiveRequest`. The server of a request opens its account first and closes it last, and only the
first close counts, so each has exactly one record. Does not know gRPC: the status code is passed
in.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from penstock.scheduler.request import NO_TIME
from penstock.server.front.content import captured_prompt
from penstock.server.front.errors import Refusal
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.phases import PREPARE, segments_of
from penstock.server.front.watched_write import WatchedWrite
from penstock.server.observe.request_record import (
    Content,
    RequestOptions,
    RequestRecord,
    Segment,
    TraceParent,
)
from penstock.server.tenants import NO_CEILINGS, PriorityCeilings

_NO_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request: a gRPC status code, and the name of its ErrorReason if any."""

    code: int
    reason: str = ""


@dataclass(slots=True, eq=False)
class RequestAccount:
    """The data of a request besides those of its `live` request.

    `call_timeout_s`: its call's timeout on arrival, infinite without one. `ceilings`: the highest
    priorities of its tenant's requests. `refusal`: reported to its caller, once known. `shared`:
    the writer that it shares with others, if it does, and `shared_stalls` its stalls before.
    `num_messages`: sent other than by its own stream. `outcome` and `end_s`: set when it is closed.
    """

    method: str
    peer: str
    arrival_s: float
    trace: TraceParent
    call_timeout_s: float = math.inf
    tenant: str = ""
    ceilings: PriorityCeilings = NO_CEILINGS
    model: str = ""
    request_id: str = ""
    options: RequestOptions = _NO_OPTIONS
    live: LiveRequest | None = None
    refusal: Refusal | None = None
    shared: WatchedWrite | None = None
    shared_stalls: tuple[float, int] = (0.0, 0)
    num_messages: int = 0
    outcome: Outcome | None = None
    end_s: float = math.nan
    stalled_s: float = 0.0
    num_stalls: int = 0

    def share(self, writer: WatchedWrite) -> None:
        """Its messages are sent by `writer`, with those of other requests."""
        self.shared = writer
        self.shared_stalls = writer.stalls(self.arrival_s)

    def seal(self, outcome: Outcome, now_s: float) -> None:
        """The request is over for its caller."""
        self.outcome = outcome
        self.end_s = now_s if now_s > self.arrival_s else self.arrival_s
        if self.live is not None:
            self.stalled_s, self.num_stalls = self.live.stream.stalls(now_s)
        if self.shared is not None:
            stalled_s, num_stalls = self.shared.stalls(now_s)
            self.stalled_s += max(0.0, stalled_s - self.shared_stalls[0])
            self.num_stalls += max(0, num_stalls - self.shared_stalls[1])

    def record(self, *, sequence: int, front_id: int, has_content: bool) -> RequestRecord:
        """The record of a sealed account."""
        live, outcome = self.live, self.outcome or _NO_OUTCOME
        if live is None:
            request_id, end_s, finish_reasons = self.request_id, self.end_s, _NO_REASONS
            numbers, num_writes, content = _NO_NUMBERS, 0, None
            segments: tuple[Segment, ...] = (Segment(PREPARE, self.arrival_s, end_s),)
        else:
            request_id, finish_reasons = live.request_id, live.finish_reasons
            numbers, num_writes = _numbers_of(live), live.stream.num_writes
            # The engine's timestamps may be slightly later than ours.
            end_s = max(self.end_s, live.phases.marks[-1].since_s)
            segments = segments_of(live.phases.marks, end_s=end_s, num_tokens=numbers[2])
            content = _content_of(live) if has_content else None
        return RequestRecord(
            sequence,
            front_id,
            request_id,
            self.method,
            self.model,
            self.tenant,
            self.peer,
            self.trace,
            self.arrival_s,
            end_s,
            outcome.code,
            outcome.reason,
            finish_reasons,
            self.options,
            segments,
            *numbers,
            self.num_messages + num_writes,
            self.stalled_s,
            self.num_stalls,
            0 if live is None else live.num_replays,
            content,
        )


_Numbers: TypeAlias = tuple[int, int, int, float, int, float, int]
"""`num_prompt_tokens` to `num_preemptions` of a record."""

_NO_NUMBERS: _Numbers = (0, 0, 0, math.nan, -1, math.nan, 0)
_NO_REASONS: tuple[str, ...] = ()
_NO_OUTCOME = Outcome(code=0)


def _numbers_of(live: LiveRequest) -> _Numbers:
    num_output_tokens = num_preemptions = 0
    for output in live.outputs:
        num_output_tokens += output.text.num_tokens
        num_preemptions += output.num_preemptions
    place = live.head.place
    estimated_queue_s = None if place is None else place.estimated_queue_s
    has_token = live.first_token_s != NO_TIME
    return (
        live.num_prompt_tokens,
        live.num_cached_tokens,
        num_output_tokens,
        max(0.0, live.first_token_s - live.arrival_s) if has_token else math.nan,
        -1 if place is None else place.num_ahead,
        math.nan if estimated_queue_s is None else estimated_queue_s,
        num_preemptions,
    )


def _content_of(live: LiveRequest) -> Content:
    outputs = (output.captured for output in live.outputs)
    return Content(
        captured_prompt(live.generation),
        tuple(captured.text for captured in outputs if captured is not None),
    )
