"""A finished stream as one GenerateOnceResponse, a part at a time.

Owns the parts: serialised messages whose concatenation is the response, since merging appends to
repeated fields. Each takes no more than some milliseconds to make, so that the event loop can run
in between: the records of a long prompt take over half a second in all.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from penstock.server.front import events
from penstock.server.rpc.id_records import encoded_id_records
from penstock.server.rpc.mapping_out import (
    TokenBytes,
    accepted_of,
    finished_of,
    merge_pieces,
    no_token_bytes,
    record_of,
)
from penstock.server.rpc.multiplex_encoding import varint
from penstock.v1 import generation_service_pb2 as service_pb
from penstock.v1 import output_pb2 as pb

_PROMPT: Final = b"\x12"  # GenerateOnceResponse.prompt
_OUTPUTS: Final = b"\x1a"  # GenerateOnceResponse.outputs
_IDS_AT_ONCE: Final = 4096
_RECORDS_AT_ONCE: Final = 64


def once_parts(
    collected: Iterable[events.StreamEvent], token_bytes: TokenBytes = no_token_bytes
) -> Iterator[bytes]:
    """The parts of the response, without progress events."""
    head = service_pb.GenerateOnceResponse()
    pieces: dict[int, list[events.TokensPiece]] = {}
    prompt: list[events.PromptPiece] = []
    for event in collected:
        match event:
            case events.TokensPiece():
                pieces.setdefault(event.output_index, []).append(event)
            case events.Accepted():
                head.accepted.CopyFrom(accepted_of(event))
            case events.PromptPiece():
                prompt.append(event)
            case events.Finished():
                head.finished.CopyFrom(finished_of(event))
            case events.Progress():
                pass
    if prompt:
        head.prompt.text = "".join([piece.text for piece in prompt])
    indices = [end.output_index for end in head.finished.outputs]
    yield head.SerializeToString()
    for piece in prompt:
        yield from _framed(_PROMPT, _prompt_records(piece.records, token_bytes))
    for index in indices:
        yield from _output(index, pieces.get(index, []), token_bytes)


def _prompt_records(
    records: Sequence[events.TokenRecord], token_bytes: TokenBytes
) -> Iterator[bytes]:
    """Serialised `PromptEcho` messages."""
    if isinstance(records, events.IdRecords):
        yield from encoded_id_records(records.ids, _IDS_AT_ONCE)
        return
    rest = iter(records)
    while some := list(islice(rest, _RECORDS_AT_ONCE)):
        made = [record_of(record, token_bytes) for record in some]
        yield pb.PromptEcho(records=made).SerializeToString()


def _output(
    index: int, pieces: list[events.TokensPiece], token_bytes: TokenBytes
) -> Iterator[bytes]:
    """One output, as one part: its length is known only when it is complete."""
    if not any(piece.records for piece in pieces):
        message = merge_pieces(pieces) if pieces else pb.TokenDelta(output_index=index)
        yield from _framed(_OUTPUTS, (message.SerializeToString(),))
        return
    text = "".join([piece.text for piece in pieces])
    num_tokens = sum([piece.num_tokens for piece in pieces])
    head = pb.TokenDelta(output_index=index, text=text, num_tokens=num_tokens)
    parts = [head.SerializeToString()]
    rest = (record for piece in pieces for record in piece.records)
    while some := list(islice(rest, _RECORDS_AT_ONCE)):
        made = [record_of(record, token_bytes) for record in some]
        parts.append(pb.TokenDelta(records=made).SerializeToString())
        yield b""
    yield from _framed(_OUTPUTS, (b"".join(parts),))


def _framed(tag: bytes, messages: Iterable[bytes]) -> Iterator[bytes]:
    for data in messages:
        yield b"".join((tag, varint(len(data)), data))
