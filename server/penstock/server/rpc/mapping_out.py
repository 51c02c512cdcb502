"""Converts stream events to response messages: groups the events, and splits and numbers the
messages.

The tokens of one output since the last write become one `TokenDelta` message. If that would exceed
the soft limit of the message size, it is split between two `TokensPiece` events (new text of an
output). The limit is soft because one event is never split.

The most frequent message is the text of one or more tokens. It is encoded directly, because
building and serialising protobuf objects takes several times as long. All other messages use
protobuf.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray

from penstock.server.front import events
from penstock.server.front.config import FrontConfig
from penstock.server.front.generation import ChunkLimits
from penstock.v1 import generation_service_pb2 as service_pb
from penstock.v1 import output_pb2 as pb
from penstock.v1 import state_pb2

_RECORD_BYTES = 20
_TOP_BYTES = 13
"""Upper bounds in bytes of the encoded size of a record and of each of its top logprobs, without
the bytes of the tokens."""
_BYTES_HEAD = 6
"""Upper bound, in bytes, of the tags and lengths that enclose the bytes of a token in the encoded
message."""

TokenBytes = Callable[[int], bytes | None]
_RECORDS: Final = 2 << 3 | 2
"""The tag of field 2 of `PromptEcho` (length-delimited)."""
_ID: Final = 1 << 3
"""The tag of field 1 of `TokenRecord` (varint)."""
_MAX_VARINT_BYTES: Final = 5
# A tag is field number times 8 plus wire type: 0 for a varint, 2 for bytes with their length.
SEQUENCE: Final = b"\x08"  # GenerateResponse.sequence
_TOKENS = b"\x22"  # GenerateResponse.tokens
_OUTPUT_INDEX = b"\x08"  # TokenDelta.output_index
_TEXT = b"\x12"  # TokenDelta.text
_NUM_TOKENS = b"\x20"  # TokenDelta.num_tokens
MAX_SHORT_TEXT_BYTES: Final = 64
"""Maximum bytes of a text for which all enclosing lengths take one byte."""
_RECORDS_OF: Final = attrgetter("records")
BYTE: Final = tuple(bytes((value,)) for value in range(128))
TEXT_HEAD: Final = tuple(
    _TOKENS + BYTE[size + 4] + _TEXT + BYTE[size] for size in range(MAX_SHORT_TEXT_BYTES + 1)
)
TEXT_TAIL: Final = tuple(_NUM_TOKENS + count for count in BYTE)
ECHO_IDS_AT_ONCE: Final = 4096
"""Number of ids of an echoed prompt that are encoded at a time. Arrays of this size fit into the
CPU cache."""


def no_token_bytes(token_id: int) -> bytes | None:
    """Return None. Used for a model whose tokens have no byte values."""
    del token_id
    return None


class ResponseEncoder:
    """Encodes the messages of one stream, numbered from 0. `sequence` is the number of the next
    message."""

    __slots__ = ("_max_message_bytes", "_token_bytes", "sequence")

    def __init__(self, max_message_bytes: int, token_bytes: TokenBytes = no_token_bytes) -> None:
        """Create the encoder of one stream. `token_bytes`: see `ModelText.token_bytes`.

        A message that would exceed `max_message_bytes` is split. This is a soft limit, because the
        text and records of one `TokensPiece` event are never split.
        """
        self._max_message_bytes = max_message_bytes
        self._token_bytes = token_bytes
        self.sequence = 0

    def encode(self, batch: Sequence[events.StreamEvent]) -> Iterable[bytes]:
        """Return the events in `batch` as serialised GenerateResponse messages, in order.

        Consecutive token events of different outputs may be reordered. Events of one output stay in
        order.
        """
        if len(batch) == 1 and isinstance(piece := batch[0], events.TokensPiece):
            return (self._tokens((piece,)),)
        return self._encode(batch)

    def _encode(self, batch: Sequence[events.StreamEvent]) -> Iterator[bytes]:
        pending: dict[int, list[events.TokensPiece]] = {}
        sizes: dict[int, int] = {}
        for event in batch:
            if isinstance(event, events.TokensPiece):
                index, text, _, records = event
                size = 4 * len(text)
                if records:
                    size += sum([_record_bytes(record, self._token_bytes) for record in records])
                if index not in pending:
                    pending[index], sizes[index] = [event], size
                elif sizes[index] + size > self._max_message_bytes:
                    yield self._tokens(pending[index])
                    pending[index], sizes[index] = [event], size
                else:
                    pending[index].append(event)
                    sizes[index] += size
                continue
            for pieces in pending.values():
                yield self._tokens(pieces)
            pending.clear()
            yield from self._single(event)
        for pieces in pending.values():
            yield self._tokens(pieces)

    def encode_text(self, text: str, num_tokens: int = 1, index: int = 0) -> bytes:
        """Return the message for `num_tokens` tokens of output `index` without token records. This
        is the most frequent message."""
        number = self.sequence
        self.sequence = number + 1
        data = text.encode()
        size = len(data)
        sequence = SEQUENCE + varint(number) if number else b""
        if 0 < size <= MAX_SHORT_TEXT_BYTES and 0 < num_tokens < 128 and not index:
            return b"".join((sequence, TEXT_HEAD[size], data, TEXT_TAIL[num_tokens]))
        tokens = b"".join(
            (
                _OUTPUT_INDEX + varint(index) if index else b"",
                _TEXT + varint(size) + data if size else b"",
                _NUM_TOKENS + varint(num_tokens) if num_tokens else b"",
            )
        )
        return b"".join((sequence, _TOKENS, varint(len(tokens)), tokens))

    def _tokens(self, pieces: Sequence[events.TokensPiece]) -> bytes:
        if any(map(_RECORDS_OF, pieces)):
            tokens = merge_pieces(pieces, self._token_bytes)
            return self._message(service_pb.GenerateResponse(tokens=tokens))
        index, text, num_tokens, _ = pieces[0]
        if len(pieces) > 1:
            text = "".join([piece.text for piece in pieces])
            num_tokens = sum([piece.num_tokens for piece in pieces])
        return self.encode_text(text, num_tokens, index)

    def _single(self, event: events.StreamEvent) -> Iterator[bytes]:
        match event:
            case events.Progress():
                yield self._message(service_pb.GenerateResponse(progress=progress_of(event)))
            case events.Accepted():
                yield self._message(service_pb.GenerateResponse(accepted=accepted_of(event)))
            case events.Finished():
                yield self._message(service_pb.GenerateResponse(finished=finished_of(event)))
            case events.PromptPiece():
                yield from self._prompt(event)
            case events.TokensPiece():
                yield self._tokens((event,))

    def _prompt(self, piece: events.PromptPiece) -> Iterator[bytes]:
        """Yield a part of the prompt as one or more messages: first its text, then its records."""
        step = max(1, self._max_message_bytes // 4)  # A character has up to four bytes.
        for start in range(0, len(piece.text), step):
            yield self._echo(pb.PromptEcho(text=piece.text[start : start + step]))
        if isinstance(piece.records, events.IdRecords):
            num_per_message = max(1, self._max_message_bytes // _RECORD_BYTES)
            for data in encoded_id_records(piece.records.ids, num_per_message):
                response = service_pb.GenerateResponse()
                response.prompt.MergeFromString(data)
                yield self._message(response)
            return
        message = pb.PromptEcho()
        size = 0
        for record in piece.records:
            if size and size + _record_bytes(record, self._token_bytes) > self._max_message_bytes:
                yield self._echo(message)
                message, size = pb.PromptEcho(), 0
            message.records.append(record_of(record, self._token_bytes))
            size += _record_bytes(record, self._token_bytes)
        if message.records:
            yield self._echo(message)

    def _echo(self, prompt: pb.PromptEcho) -> bytes:
        return self._message(service_pb.GenerateResponse(prompt=prompt))

    def _message(self, response: service_pb.GenerateResponse) -> bytes:
        response.sequence = self.sequence
        self.sequence += 1
        return response.SerializeToString()


def varint(value: int) -> bytes:
    """Encode the non-negative `value` as a protobuf varint."""
    if value < 128:
        return BYTE[value]
    if value < 16384:
        return (value & 0x7F | 0x80 | value >> 7 << 8).to_bytes(2, "little")
    digits = bytearray()
    while value >= 128:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def encoder_for(
    chunks: ChunkLimits, config: FrontConfig, token_bytes: TokenBytes = no_token_bytes
) -> ResponseEncoder:
    """Return the encoder of one stream. The soft limit of its message size is larger if tokens are
    held back for larger messages."""
    max_bytes = config.max_message_bytes_hint
    if chunks.is_holding:
        max_bytes = max(max_bytes, config.max_shared_message_bytes_hint)
    return ResponseEncoder(max_bytes, token_bytes)


def merge_pieces(
    pieces: Sequence[events.TokensPiece], token_bytes: TokenBytes = no_token_bytes
) -> pb.TokenDelta:
    """Merge consecutive token events of one output into one message."""
    first = pieces[0]
    if len(pieces) == 1:
        text, num_tokens = first.text, first.num_tokens
    else:
        text = "".join([piece.text for piece in pieces])
        num_tokens = sum([piece.num_tokens for piece in pieces])
    message = pb.TokenDelta(output_index=first.output_index, text=text, num_tokens=num_tokens)
    for piece in pieces:
        for record in piece.records:
            message.records.append(record_of(record, token_bytes))
    return message


def record_of(
    record: events.TokenRecord, token_bytes: TokenBytes = no_token_bytes
) -> pb.TokenRecord:
    """Return the record of one token. Without a logprob it has only the id; otherwise also the
    logprob, the rank, the top logprobs, and the bytes of the token if they are known."""
    message = pb.TokenRecord(id=record.token_id)
    if record.logprob is not None:
        message.logprob = record.logprob
        message.rank = record.rank
        data = token_bytes(record.token_id)
        if data is not None:
            message.token_bytes = data
        for top in record.top:
            message.top_logprobs.add(
                id=top.token_id, logprob=top.logprob, token_bytes=token_bytes(top.token_id)
            )
    return message


def accepted_of(event: events.Accepted) -> pb.RequestAccepted:
    """Return the message for an accepted request, the first of a stream."""
    return pb.RequestAccepted(
        request_id=event.request_id,
        model=event.model,
        num_prompt_tokens=event.num_prompt_tokens,
        seed=event.seed,
        trace_id=event.trace_id,
        estimated_queue_duration=_if_known(event.estimated_queue_s),
        num_dropped_messages=event.num_dropped_messages,
    )


def progress_of(event: events.Progress) -> pb.RequestProgress:
    """Return the message for a change of the state or of the queue position."""
    return pb.RequestProgress(
        state=state_pb2.RequestState.ValueType(event.state.value),
        num_cached_prompt_tokens=event.num_cached_prompt_tokens,
        num_preemptions=event.num_preemptions,
        queue_duration=duration_of(event.queue_s),
        queue_position=event.queue_position,
        wait_reason=wait_reason_of("" if event.waits_for is None else event.waits_for.name),
        estimated_queue_duration=_if_known(event.estimated_queue_s),
    )


def finished_of(event: events.Finished) -> pb.RequestFinished:
    """Return the last message of a stream that finished."""
    timings = event.timings
    return pb.RequestFinished(
        outputs=[_end_of(end) for end in event.outputs],
        usage=pb.TokenUsage(
            num_prompt_tokens=event.usage.num_prompt_tokens,
            num_completion_tokens=event.usage.num_completion_tokens,
            num_cached_prompt_tokens=event.usage.num_cached_prompt_tokens,
        ),
        timings=pb.RequestTimings(
            queue_duration=duration_of(timings.queue_s),
            prefill_duration=duration_of(timings.prefill_s),
            ttft_duration=_if_known(timings.ttft_s),
            decode_duration=duration_of(timings.decode_s),
            total_duration=duration_of(timings.total_s),
        ),
        num_preemptions=event.num_preemptions,
    )


def wait_reason_of(name: str) -> state_pb2.WaitReason.ValueType:
    """Return the WaitReason with this name; unspecified for an empty name."""
    if not name:
        return state_pb2.WAIT_REASON_UNSPECIFIED
    return state_pb2.WaitReason.Value(f"WAIT_REASON_{name}")


def duration_of(seconds: float) -> Duration:
    """Convert seconds to a protobuf Duration, rounded to microseconds."""
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration


def _if_known(seconds: float | None) -> Duration | None:
    return None if seconds is None or not math.isfinite(seconds) else duration_of(seconds)


def _end_of(end: events.OutputEnd) -> pb.OutputEnd:
    message = pb.OutputEnd(
        output_index=end.output_index,
        finish_reason=state_pb2.FinishReason.ValueType(end.reason.value),
        num_completion_tokens=end.num_completion_tokens,
    )
    if end.stop_string is not None:
        message.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id
    return message


def _record_bytes(record: events.TokenRecord, token_bytes: TokenBytes) -> int:
    if record.logprob is None:
        return _RECORD_BYTES
    ids = (record.token_id, *(top.token_id for top in record.top))
    num_bytes = sum(_BYTES_HEAD + len(token_bytes(token_id) or b"") for token_id in ids)
    return _RECORD_BYTES + _TOP_BYTES * len(record.top) + num_bytes


def encoded_id_records(ids: NDArray[np.int32], num_per_part: int) -> Iterator[bytes]:
    """Yield serialised `PromptEcho` messages with the records of `ids`, at most `num_per_part`
    each."""
    num_at_once = num_per_part * max(1, ECHO_IDS_AT_ONCE // num_per_part)
    for first in range(0, len(ids), num_at_once):
        data, ends = _records(ids[first : first + num_at_once])
        start = 0
        for end in (*ends[num_per_part - 1 : -1 : num_per_part], ends[-1]):
            yield data[start:end]
            start = end


def _records(ids: NDArray[np.int32]) -> tuple[bytes, list[int]]:
    """Return the encoded `records` fields of a `PromptEcho` with `ids`, and the end offset of
    each."""
    values = ids.astype(np.uint32)
    rows = np.empty((len(values), 3 + _MAX_VARINT_BYTES), dtype=np.uint8)
    is_written = np.ones(rows.shape, dtype=np.bool_)
    rows[:, 0], rows[:, 2] = _RECORDS, _ID
    # An id of zero is not encoded, so the record has no field.
    is_written[:, 2] = values > 0
    for column in range(3, rows.shape[1]):
        is_written[:, column] = values > 0
        rows[:, column] = values & 0x7F
        values >>= 7
        rows[:, column] |= (values > 0).astype(np.uint8) << 7
    sizes = is_written.sum(axis=1)
    rows[:, 1] = sizes - 2
    return rows[is_written].tobytes(), np.cumsum(sizes).tolist()
