"""The account of one request, from its arrival to its record, whatever becomes of it.

Owns what is known before the front has taken a request and how it ended; all else is its
`LiveRequest`'s. Whoever serves the request opens its account first and closes it last, and only the
first closing counts, so there is exactly one record of each. Does not know gRPC: the code it is
closed with comes from the edge.
"""

import math
from dataclasses import dataclass, replace

from penstock.scheduler.request import NO_TIME
from penstock.server.front.content import captured_prompt
from penstock.server.front.errors import Refusal
from penstock.server.front.generation import Generation
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.segments import segments_of
from penstock.server.front.watched_write import WatchedWrite
from penstock.server.telemetry.request_record import (
    Content,
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
    TraceParent,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: a gRPC status code, and the name of the ErrorReason behind it if any."""

    code: int
    reason: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestAccount:
    """What is known of one request besides what its `live` request knows.

    `call_timeout_s`: what its call's deadline was on arrival, infinite without one.
    `refusal`: what its caller is told, once that is known. `shared`: the writer that it shares with
    others, if it does, and `shared_stalls` what that had been blocked before. `num_messages`: sent
    other than by its own stream. `outcome` and `end_s`: set when it is closed.
    """

    method: str
    peer: str
    arrival_s: float
    trace: TraceParent
    call_timeout_s: float = math.inf
    tenant: str = ""
    model: str = ""
    request_id: str = ""
    options: RequestOptions | None = None
    live: LiveRequest | None = None
    refusal: Refusal | None = None
    shared: WatchedWrite | None = None
    shared_stalls: tuple[float, int] = (0.0, 0)
    num_messages: int = 0
    outcome: Outcome | None = None
    end_s: float = math.nan
    stalled_s: float = 0.0
    num_stalls: int = 0

    def stamp(self, generation: Generation) -> Generation:
        """`generation` with what comes with the call and not from the message."""
        return replace(generation, tenant=self.tenant, trace_id=self.trace.trace_id)

    def share(self, writer: WatchedWrite) -> None:
        """Its messages go out by `writer`, with those of others."""
        self.shared = writer
        self.shared_stalls = writer.stalls(self.arrival_s)

    def seal(self, outcome: Outcome, now_s: float) -> None:
        """The request is over as far as its caller is concerned."""
        self.outcome = outcome
        self.end_s = max(now_s, self.arrival_s)
        if self.live is not None:
            self.stalled_s, self.num_stalls = self.live.stream.stalls(now_s)
        if self.shared is not None:
            stalled_s, num_stalls = self.shared.stalls(now_s)
            self.stalled_s += max(0.0, stalled_s - self.shared_stalls[0])
            self.num_stalls += max(0, num_stalls - self.shared_stalls[1])

    def record(self, *, sequence: int, front_id: int, has_content: bool) -> RequestRecord:
        """The record of an account that is sealed."""
        outcome = self.outcome or Outcome(code=0)
        record = RequestRecord(
            sequence=sequence,
            front_id=front_id,
            request_id=self.request_id,
            method=self.method,
            model=self.model,
            tenant=self.tenant,
            peer=self.peer,
            trace=self.trace,
            arrival_s=self.arrival_s,
            end_s=self.end_s,
            code=outcome.code,
            reason=outcome.reason,
            finish_reasons=(),
            options=self.options or RequestOptions(),
            segments=(),
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_completion_tokens=0,
            ttft_s=math.nan,
            num_ahead=-1,
            estimated_queue_s=math.nan,
            num_preemptions=0,
            num_messages=self.num_messages,
            stalled_s=self.stalled_s,
            num_stalls=self.num_stalls,
        )
        if self.live is not None:
            _tell_of(self.live, record)
            record.content = _content_of(self.live) if has_content else None
        else:
            record.segments = (Segment(SegmentKind.PREPARE, self.arrival_s, self.end_s),)
        return record


def _tell_of(live: LiveRequest, record: RequestRecord) -> None:
    """What a request knows that the front had taken."""
    marks, place, num_tokens = live.phases.marks, live.opening.place, live.num_output_tokens
    # The engine's stamps may be later than ours, by very little.
    record.end_s = max(record.end_s, marks[-1].since_s)
    record.segments = segments_of(marks, end_s=record.end_s, num_tokens=num_tokens)
    record.request_id = live.request_id
    record.finish_reasons = live.finish_reasons
    record.num_prompt_tokens = live.num_prompt_tokens
    record.num_cached_tokens = live.num_cached_tokens
    record.num_completion_tokens = num_tokens
    record.num_preemptions = live.num_preemptions
    record.num_messages += live.stream.num_writes
    if live.first_token_s != NO_TIME:
        record.ttft_s = max(0.0, live.first_token_s - live.arrival_s)
    if place is not None:
        record.num_ahead = place.num_ahead
        if place.estimated_queue_s is not None:
            record.estimated_queue_s = place.estimated_queue_s


def _content_of(live: LiveRequest) -> Content:
    outputs = (output.captured for output in live.outputs)
    return Content(
        captured_prompt(live.generation),
        tuple(captured.text for captured in outputs if captured is not None),
    )
