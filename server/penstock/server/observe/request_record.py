"""The record of an ended request, from which metrics, traces and statistics are computed.

Defines the values and their encoding, without protobuf, OpenTelemetry or sockets. A record contains
no prompt, output or token id, unless content capture is enabled (`content`). All times are seconds
on the machine's monotonic clock, which all processes of a service share.

Also contains the recorder of a front (gRPC server process), which counts requests by outcome,
checks the sequence numbers of the records and passes the records on without blocking.
"""

import enum
from collections.abc import Callable

import msgspec

from penstock.scheduler.events import Residency, Wait
from penstock.server.observe.frames import OutcomeCount

_ENCODER = msgspec.msgpack.Encoder()
ENGINE_LOST = "engine_lost"
"""Wait reason: the engine of the request died, and no new engine was ready yet."""
UNREADABLE = "unreadable"
"""Drop reason: the record could not be created, because of an internal error."""


class SegmentKind(enum.StrEnum):
    """A phase of a request. The values are also the names of the request's child spans."""

    PREPARE = "prepare"
    """Parsing, validation, tokenisation."""
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    DELIVER = "deliver"
    """The engine has finished the request, and the last messages are being sent."""


class Segment(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One phase of a request. The segments of a record are contiguous and do not overlap.

    Mutable, because `PhaseClock` fills it in.

    Attributes:
        wait: The queue time by reason; only for a QUEUE segment, if known.
        residency: Statistics of an interval in the running batch; only in the last segment of that
            interval.
        num_cached_tokens: Number of prompt tokens that were cached; only for PREFILL.
        num_tokens: Number of output tokens; only for DECODE.
        is_engine_lost: Only for QUEUE: True if the engine of the request died and the request
            waited for a new engine.
    """

    kind: SegmentKind
    start_s: float
    end_s: float
    wait: Wait | None = None
    residency: Residency | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    is_engine_lost: bool = False


class TraceParent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position of a request in a distributed trace. Ids are empty if the request is not traced.

    Attributes:
        trace_id: The trace id of the request, 16 bytes.
        span_id: The id of its root span, 8 bytes.
        parent_span_id: The caller's span, 8 bytes; empty if the trace begins with this request.
        is_parent_sampled: The caller's sampling decision, None without a caller.
        trace_state: The caller's trace state; empty if there is none.
    """

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = b""
    is_parent_sampled: bool | None = None
    trace_state: str = ""


class RequestOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The options of a request that traces include. None means that an option is not set."""

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
    """The prompt and the outputs as text. They are recorded only with content capture."""

    prompt: str
    outputs: tuple[str, ...]


class RequestRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One ended request.

    Attributes:
        method: The full name of the RPC, such as `penstock.v1.GenerationService/Generate`. It ends
            with `/Multiplex` for each request of a Multiplex stream.
        peer: The client's address as gRPC formats it, such as `ipv4:127.0.0.1:50000`.
        code: The final gRPC status code, as a number.
        reason: The name of its ErrorReason; empty if the request completed or its client
            disconnected.
        finish_reasons: One name of FinishReason per output.
        ttft_s: Time from arrival to the first token, in seconds; NaN without a token.
        num_ahead: Number of requests ahead of it when it was queued; -1 if it was not queued.
        estimated_queue_s: The wait that was predicted when it was queued, in seconds; NaN if there
            was no prediction.
        stalled_s: Total time for which writes blocked because its client did not read, in seconds.
        num_stalls: Number of writes that blocked because its client did not read.
        num_messages: Number of messages sent.
        num_replays: Number of times that it was resubmitted after an engine crash.
        sequence: Number of the record among the records of its front, from 0, to detect lost
            records.
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
    """Encode the record. Raises TypeError for a value of an unsupported type."""
    return _ENCODER.encode(record)


def decode_record(data: bytes) -> RequestRecord:
    """Decode one record. Raises ValueError if the bytes are not a record."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no record: {error}") from error


class RequestRecorder:
    """Counts the records of a front and passes them to `offer`.

    `offer` receives each record encoded (see `encode_record`). It must not block, and counts the
    records that it drops. Without `offer`, records are only counted. `num_records` is the number of
    records so far. It is also the sequence number of the next record. `num_unreadable` is the
    number of records that could not be created.
    """

    def __init__(self, offer: Callable[[bytes], None] | None = None) -> None:
        self._offer = offer
        self._outcomes: dict[tuple[str, int, str, str], int] = {}
        self.num_records = 0
        self.num_unreadable = 0

    def note(self, record: RequestRecord) -> None:
        """Count a record and pass it to `offer`. Raises ValueError unless its sequence number is
        `num_records`, and TypeError if it cannot be encoded."""
        if record.sequence != self.num_records:
            raise ValueError(f"sequence must be {self.num_records}, not {record.sequence}")
        data = b"" if self._offer is None else encode_record(record)
        self.num_records += 1
        finish_reason = record.finish_reasons[0] if record.finish_reasons else ""
        self._count((record.method, record.code, record.reason, finish_reason))
        if self._offer is not None:
            self._offer(data)

    def note_unreadable(self, method: str, code: int, reason: str) -> None:
        """Count a request whose record could not be created, and count the record as dropped."""
        self.num_records += 1
        self._count((method, code, reason, ""))
        self.num_unreadable += 1

    def outcomes(self) -> tuple[OutcomeCount, ...]:
        """Return the number of ended requests by outcome since the start of the front."""
        return tuple(
            OutcomeCount(
                method=method, code=code, reason=reason, finish_reason=finish_reason, num=num
            )
            for (method, code, reason, finish_reason), num in self._outcomes.items()
        )

    def _count(self, ending: tuple[str, int, str, str]) -> None:
        self._outcomes[ending] = self._outcomes.get(ending, 0) + 1
