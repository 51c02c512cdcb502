"""Encodes a finished stream as one GenerateOnceResponse, in parts.

The parts are serialised messages. Their concatenation is the response, because protobuf merges
concatenated messages, and appends to repeated fields. Each part takes at most some milliseconds,
and other work of the event loop can run in between; the token records of a long prompt take over
half a second in total. Received token records are stored as bytes, because with hundreds of
thousands of objects, one run of the garbage collector would take a quarter of a second.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from penstock.server.front import events
from penstock.server.rpc.mapping_out import (
    ECHO_IDS_AT_ONCE,
    TokenBytes,
    accepted_of,
    encoded_id_records,
    finished_of,
    no_token_bytes,
    record_of,
    varint,
)
from penstock.v1 import generation_service_pb2 as service_pb
from penstock.v1 import output_pb2 as pb

_PROMPT: Final = b"\x12"  # GenerateOnceResponse.prompt
_OUTPUTS: Final = b"\x1a"  # GenerateOnceResponse.outputs
_RECORDS_AT_ONCE: Final = 64


class OnceEncoder:
    """Collects the events of one stream, and creates its response when the stream has ended."""

    def __init__(self, token_bytes: TokenBytes = no_token_bytes) -> None:
        self._token_bytes = token_bytes
        self._head = service_pb.GenerateOnceResponse()
        self._prompt_texts: list[str] = []
        self._prompt: list[bytes] = []
        self._outputs: dict[int, _EncodedOutput] = {}

    def add(self, batch: Iterable[events.StreamEvent]) -> Iterator[None]:
        """Add the events in `batch`; progress events are ignored. Yields after each part of the
        work, so that the caller can yield to the event loop."""
        for event in batch:
            match event:
                case events.TokensPiece():
                    output = self._outputs.setdefault(event.output_index, _EncodedOutput())
                    yield from output.add(event, self._token_bytes)
                case events.Accepted():
                    self._head.accepted.CopyFrom(accepted_of(event))
                case events.PromptPiece():
                    self._prompt_texts.append(event.text)
                    for data in _prompt_records(event.records, self._token_bytes):
                        self._prompt.append(b"".join((_PROMPT, varint(len(data)), data)))
                        yield
                case events.Finished():
                    self._head.finished.CopyFrom(finished_of(event))
                case events.Progress():
                    pass

    def parts(self) -> Iterator[bytes]:
        """Yield the response in serialised parts. Call this after the last `add`."""
        if self._prompt_texts:
            self._head.prompt.text = "".join(self._prompt_texts)
        yield self._head.SerializeToString()
        yield from self._prompt
        for end in self._head.finished.outputs:
            index = end.output_index
            yield from self._outputs.get(index, _EncodedOutput()).parts(index)


class _EncodedOutput:
    """The text and the token records of one output so far."""

    __slots__ = ("_num_tokens", "_records", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_tokens = 0
        self._records: list[bytes] = []  # Serialised `TokenDelta` messages.

    def add(self, piece: events.TokensPiece, token_bytes: TokenBytes) -> Iterator[None]:
        self._texts.append(piece.text)
        self._num_tokens += piece.num_tokens
        rest = iter(piece.records)
        while some := list(islice(rest, _RECORDS_AT_ONCE)):
            made = [record_of(record, token_bytes) for record in some]
            self._records.append(pb.TokenDelta(records=made).SerializeToString())
            yield

    def parts(self, index: int) -> Iterator[bytes]:
        """Yield the encoded `outputs` field of the response for output `index`, in parts. Call this
        at the end of the stream, because the field starts with its length."""
        text = "".join(self._texts)
        head = pb.TokenDelta(output_index=index, text=text, num_tokens=self._num_tokens)
        data = head.SerializeToString()
        num_bytes = len(data) + sum(map(len, self._records))
        yield b"".join((_OUTPUTS, varint(num_bytes), data))
        yield from self._records


def _prompt_records(
    records: Sequence[events.TokenRecord], token_bytes: TokenBytes
) -> Iterator[bytes]:
    """Yield serialised `PromptEcho` messages with these records."""
    if isinstance(records, events.IdRecords):
        yield from encoded_id_records(records.ids, ECHO_IDS_AT_ONCE)
        return
    rest = iter(records)
    while some := list(islice(rest, _RECORDS_AT_ONCE)):
        made = [record_of(record, token_bytes) for record in some]
        yield pb.PromptEcho(records=made).SerializeToString()
