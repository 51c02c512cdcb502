"""Stream events to response messages: numbered, grouped, split.

Owns the shape of what goes out. Pieces of one output that came since the last write become one
`Tokens` message; a message that would grow past the size hint is split where a piece ends.
"""

import math
from collections.abc import Iterable, Iterator

from google.protobuf.duration_pb2 import Duration

from penstock.server.front import events
from penstock.server.front.config import FrontConfig
from penstock.server.front.generation import ChunkLimits
from penstock.server.rpc.id_records import encoded_id_records
from penstock.v1 import generation_service_pb2 as service_pb
from penstock.v1 import output_pb2 as pb
from penstock.v1 import state_pb2

_RECORD_BYTES = 20
_TOP_BYTES = 13
"""Upper estimates of an encoded record and of each of its alternatives."""


class ResponseEncoder:
    """The messages of one stream. Numbers them from 0; `sequence` is the next one's number."""

    __slots__ = ("_max_message_bytes", "sequence")

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self.sequence = 0

    def encode(self, batch: Iterable[events.StreamEvent]) -> Iterator[bytes]:
        """Serialised GenerateResponse messages for everything in `batch`, in order.

        Between two other events the order of outputs among each other is not kept, which nobody
        can observe; the order within an output is.
        """
        pending: dict[int, list[events.TokensPiece]] = {}
        sizes: dict[int, int] = {}
        for event in batch:
            if isinstance(event, events.TokensPiece):
                index = event.output_index
                size = _piece_bytes(event)
                if sizes.get(index, 0) + size > self._max_message_bytes and index in pending:
                    yield self._tokens(pending.pop(index))
                    sizes[index] = 0
                pending.setdefault(index, []).append(event)
                sizes[index] = sizes.get(index, 0) + size
                continue
            for pieces in pending.values():
                yield self._tokens(pieces)
            pending.clear()
            sizes.clear()
            yield from self._single(event)
        for pieces in pending.values():
            yield self._tokens(pieces)

    def _tokens(self, pieces: list[events.TokensPiece]) -> bytes:
        return self._message(tokens=merge_pieces(pieces))

    def _single(self, event: events.StreamEvent) -> Iterator[bytes]:
        match event:
            case events.Accepted():
                yield self._message(accepted=accepted_of(event))
            case events.Progress():
                yield self._message(progress=progress_of(event))
            case events.Finished():
                yield self._message(finished=finished_of(event))
            case events.PromptPiece():
                yield from self._prompt(event)
            case events.TokensPiece():
                yield self._tokens([event])

    def _prompt(self, piece: events.PromptPiece) -> Iterator[bytes]:
        """A long prompt in several messages: its text first, then its records."""
        step = max(1, self._max_message_bytes // 4)  # a character has up to four bytes
        for start in range(0, len(piece.text), step):
            yield self._message(prompt=pb.Prompt(text=piece.text[start : start + step]))
        if isinstance(piece.records, events.IdRecords):
            num_per_message = max(1, self._max_message_bytes // _RECORD_BYTES)
            for data in encoded_id_records(piece.records.ids, num_per_message):
                response = service_pb.GenerateResponse(sequence=self.sequence)
                response.prompt.MergeFromString(data)
                self.sequence += 1
                yield response.SerializeToString()
            return
        message = pb.Prompt()
        size = 0
        for record in piece.records:
            if size and size + _record_bytes(record) > self._max_message_bytes:
                yield self._message(prompt=message)
                message, size = pb.Prompt(), 0
            message.records.append(record_of(record))
            size += _record_bytes(record)
        if message.records:
            yield self._message(prompt=message)

    def _message(
        self,
        *,
        accepted: pb.Accepted | None = None,
        progress: pb.Progress | None = None,
        tokens: pb.Tokens | None = None,
        finished: pb.Finished | None = None,
        prompt: pb.Prompt | None = None,
    ) -> bytes:
        response = service_pb.GenerateResponse(
            sequence=self.sequence,
            accepted=accepted,
            progress=progress,
            tokens=tokens,
            finished=finished,
            prompt=prompt,
        )
        self.sequence += 1
        return response.SerializeToString()


def encoder_for(chunks: ChunkLimits, config: FrontConfig) -> ResponseEncoder:
    """The encoder of one stream: who asks for large messages does not get them in parts again."""
    if chunks.is_holding:
        return ResponseEncoder(
            max(config.max_message_bytes_hint, config.max_shared_message_bytes_hint)
        )
    return ResponseEncoder(config.max_message_bytes_hint)


def merge_pieces(pieces: list[events.TokensPiece]) -> pb.Tokens:
    """One message for consecutive pieces of one output."""
    first = pieces[0]
    if len(pieces) == 1:
        text, num_tokens = first.text, first.num_tokens
    else:
        text = "".join([piece.text for piece in pieces])
        num_tokens = sum([piece.num_tokens for piece in pieces])
    message = pb.Tokens(output_index=first.output_index, text=text, num_tokens=num_tokens)
    for piece in pieces:
        for record in piece.records:
            message.records.append(record_of(record))
    return message


def record_of(record: events.TokenRecord) -> pb.TokenRecord:
    """One token; logprob and rank are set together or not at all."""
    message = pb.TokenRecord(id=record.token_id)
    if record.logprob is not None:
        message.logprob = record.logprob
        message.rank = record.rank
        for top in record.top:
            message.top_logprobs.add(id=top.token_id, logprob=top.logprob)
    return message


def accepted_of(event: events.Accepted) -> pb.Accepted:
    """The first message of a stream."""
    return pb.Accepted(
        request_id=event.request_id,
        model=event.model,
        num_prompt_tokens=event.num_prompt_tokens,
        seed=event.seed,
        estimated_queue_time=_if_known(event.estimated_queue_s),
        num_dropped_messages=event.num_dropped_messages,
    )


def progress_of(event: events.Progress) -> pb.Progress:
    """A change of state, or a place in the queue."""
    return pb.Progress(
        state=state_pb2.RequestState.ValueType(event.state.value),
        num_cached_prompt_tokens=event.num_cached_prompt_tokens,
        num_preemptions=event.num_preemptions,
        queue_time=duration_of(event.queue_s),
        queue_position=event.queue_position,
        estimated_queue_time=_if_known(event.estimated_queue_s),
    )


def finished_of(event: events.Finished) -> pb.Finished:
    """The last message of a stream that ended well."""
    timings = event.timings
    return pb.Finished(
        outputs=[_end_of(end) for end in event.outputs],
        usage=pb.Usage(
            num_prompt_tokens=event.usage.num_prompt_tokens,
            num_completion_tokens=event.usage.num_completion_tokens,
            num_cached_prompt_tokens=event.usage.num_cached_prompt_tokens,
        ),
        timings=pb.Timings(
            queue=duration_of(timings.queue_s),
            prefill=duration_of(timings.prefill_s),
            ttft=_if_known(timings.ttft_s),
            decode=duration_of(timings.decode_s),
            total=duration_of(timings.total_s),
        ),
        num_preemptions=event.num_preemptions,
    )


def duration_of(seconds: float) -> Duration:
    """Whole microseconds: finer than any clock here is worth."""
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


def _piece_bytes(piece: events.TokensPiece) -> int:
    return 4 * len(piece.text) + sum([_record_bytes(record) for record in piece.records])


def _record_bytes(record: events.TokenRecord) -> int:
    return _RECORD_BYTES + _TOP_BYTES * len(record.top)
