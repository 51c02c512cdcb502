"""The record of an ended request, shared by all consumers.

Owns the values and their encoding, independent of protobuf, OpenTelemetry and sockets. They contain
no prompt, output or token id, unless content capture is enabled (`content`).

All times are seconds on the machine's monotonic clock, which all processes of a service share.

Owns the recorder of a front, too: the counts by outcome and the sequence numbers. It does not know
the destination of its records and never waits for it.
"""

import enum
from collections.abc import Callable

import msgspec

from penstock.scheduler.events import Stay, Wait
from penstock.server.observe.frames import OutcomeCount

_ENCODER = msgspec.msgpack.Encoder()
NO_ROOM = "no_room"
"""Drop reason: `offer` rejected the record."""
UNREADABLE = "unreadable"
"""Drop reason: an internal error."""


class SegmentKind(enum.StrEnum):
    """Phase of a request. The values are the names of its child spans."""

    PREPARE = "prepare"
    """Parsing, validation, tokenisation."""
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    DELIVER = "deliver"
    """The engine has finished the request; the last messages are being sent."""


class Segment(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One phase of a request. The segments of a record are contiguous and do not overlap. Mutable,
    for `PhaseClock`, which fills them in.

    `wait`: of a QUEUE with known reasons. `stay`: residency in the running batch, in its last
    segment, including its PREFILL. `num_cached_tokens`: of a PREFILL. `num_tokens`: of a DECODE.
    `is_engine_lost`: a QUEUE without an engine: the request's engine died, and it waited for the
    next one.
    """

    kind: SegmentKind
    start_s: float
    end_s: float
    wait: Wait | None = None
    stay: Stay | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    is_engine_lost: bool = False


class TraceParent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position of a request in a distributed trace.

    `trace_id` (16 bytes) and `span_id` (8 bytes) are the request's own. `parent_span_id`: 8 bytes,
    the caller's span; empty if this request begins the trace. `is_parent_sampled`: the caller's
    decision, None without a caller. `trace_state`: the caller's, passed on. Ids are empty if the
    request is not traced.
    """

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = b""
    is_parent_sampled: bool | None = None
    trace_state: str = ""


class RequestOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The request's options that traces include. None: not set."""

    is_chat: bool = False
    is_stream: bool = True
    num_outputs: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    priority: int = 0


class Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Prompt and outputs as text; only with content capture."""

    prompt: str
    outputs: tuple[str, ...]


class RequestRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One ended request.

    `method`: the full name of the RPC, such as `penstock.v1.GenerationService/Generate`; for a
    request of a Multiplex stream, the name of that method. `code`: the final gRPC status code, as a
    number; `reason`: the name of its ErrorReason, empty if it completed or its client disconnected.
    `finish_reasons`: one per output, names of FinishReason. `ttft_s`: from arrival to the first
    token, NaN without one. `num_ahead`: number of requests ahead of it when it was queued, -1 if it
    never was. `estimated_queue_s`: the wait predicted at that time, NaN if none. `stalled_s`,
    `num_stalls`: time and number of writes blocked by its client. `num_messages`: messages sent.
    `num_replays`: engine crashes that it survived. `sequence`: counts the records of a front from
    0, so that losses are detected.
    """

    sequence: int
    front_id: int
    request_id: str
    method: str
    model: str
    tenant: str
    peer: str
    trace: TraceParent
    arrival_s: float
    end_s: float
    code: int
    reason: str
    finish_reasons: tuple[str, ...]
    options: RequestOptions
    segments: tuple[Segment, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    ttft_s: float
    num_ahead: int
    estimated_queue_s: float
    num_preemptions: int
    num_messages: int
    stalled_s: float
    num_stalls: int
    num_replays: int = 0
    content: Content | None = None


_DECODER = msgspec.msgpack.Decoder(RequestRecord)


def encode_record(record: RequestRecord) -> bytes:
    """Encode the record. Raises TypeError for a field of another type."""
    return _ENCODER.encode(record)


def decode_record(data: bytes) -> RequestRecord:
    """Decode one record. Raises ValueError for anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no record: {error}") from error


class RequestRecorder:
    """Counts every record and passes it on.

    `offer` receives each one encoded (see `encode_record`) and returns whether it accepted it; it
    must not block. Without `offer`, records are only counted. `num_records`: number counted so far,
    and the sequence number of the next one. `dropped_records`: number of lost ones by reason.
    """

    def __init__(self, offer: Callable[[bytes], bool] | None = None) -> None:
        self._offer = offer
        self._outcomes: dict[tuple[str, int, str, str], int] = {}
        self.num_records = 0
        self.dropped_records: dict[str, int] = {}

    def note(self, record: RequestRecord) -> None:
        """Add a record. Raises ValueError unless its sequence is `num_records`."""
        if record.sequence != self.num_records:
            raise ValueError(f"sequence must be {self.num_records}, not {record.sequence}")
        data = b"" if self._offer is None else encode_record(record)
        self.num_records += 1
        finish_reason = record.finish_reasons[0] if record.finish_reasons else ""
        self._count((record.method, record.code, record.reason, finish_reason))
        if self._offer is not None and not self._offer(data):
            self._drop(NO_ROOM)

    def note_unreadable(self, method: str, code: int, reason: str) -> None:
        """Count a request whose record could not be made."""
        self.num_records += 1
        self._count((method, code, reason, ""))
        self._drop(UNREADABLE)

    def outcomes(self) -> tuple[OutcomeCount, ...]:
        """Return the number of ended requests by outcome, since the front's start."""
        return tuple(
            OutcomeCount(
                method=method, code=code, reason=reason, finish_reason=finish_reason, num=num
            )
            for (method, code, reason, finish_reason), num in self._outcomes.items()
        )

    def _count(self, ending: tuple[str, int, str, str]) -> None:
        self._outcomes[ending] = self._outcomes.get(ending, 0) + 1

    def _drop(self, why: str) -> None:
        self.dropped_records[why] = self.dropped_records.get(why, 0) + 1
