"""Encodes the events of one request as serialised MultiplexResponse messages.

The most frequent event is the text of one or more tokens. It is encoded directly, together with its
enclosing fields, as in `mapping_out.py`.

Encoded events can be concatenated into one message: protobuf merges concatenated messages by
appending to repeated fields, and the only field of MultiplexResponse is repeated.
"""

from collections.abc import Iterable, Sequence

from penstock.server.front.events import StreamEvent, TokensPiece
from penstock.server.rpc.mapping_out import (
    BYTE,
    MAX_SHORT_TEXT_BYTES,
    SEQUENCE,
    TEXT_HEAD,
    TEXT_TAIL,
    ResponseEncoder,
    varint,
)

_EVENTS = b"\x0a"  # MultiplexResponse.events
_KEY = b"\x08"  # MultiplexEvent.key
_RESPONSE = b"\x12"  # MultiplexEvent.response
_ERROR = b"\x1a"  # MultiplexEvent.error
_EVENT_HEAD = tuple(_EVENTS + size for size in BYTE)
_RESPONSE_HEAD = tuple(size + SEQUENCE for size in BYTE)


class MultiplexEncoder:
    """Encodes the events of one request of a Multiplex stream. `key` is the number that its client
    chose for the request."""

    __slots__ = ("_head", "_max_plain_chars", "_num_around_response", "_responses")

    def __init__(self, key: int, responses: ResponseEncoder, max_plain_chars: int) -> None:
        """Create the encoder.

        `responses` numbers and splits messages. Texts of at most `max_plain_chars` characters need
        no splitting.
        """
        self._head = _key_field(key) + _RESPONSE
        self._num_around_response = len(self._head) + 1
        self._responses = responses
        self._max_plain_chars = max_plain_chars

    @property
    def responses(self) -> ResponseEncoder:
        """The encoder that numbers the responses."""
        return self._responses

    @property
    def num_responses(self) -> int:
        """Number of responses encoded so far."""
        return self._responses.sequence

    def encode(self, batch: Sequence[StreamEvent]) -> Sequence[bytes]:
        """Return the events in `batch` as serialised MultiplexResponse messages, grouped and
        ordered as by `ResponseEncoder.encode`."""
        piece = batch[0] if len(batch) == 1 else _plain_tokens(batch)
        if isinstance(piece, TokensPiece):
            index, text, num_tokens, records = piece
            if not records and len(text) <= self._max_plain_chars:
                if index:
                    return (self._tokens(index, text, num_tokens),)
                return (self.encode_text(text, num_tokens),)
        return self.frame(self._responses.encode(batch))

    def frame(self, messages: Iterable[bytes]) -> Sequence[bytes]:
        """Wrap each serialised GenerateResponse in a MultiplexResponse, and return these messages,
        serialised."""
        return [_framed(self._head, data) for data in messages]

    def encode_text(self, text: str, num_tokens: int = 1) -> bytes:
        """Encode text of output 0 without records, exactly as `encode` would, but faster."""
        responses = self._responses
        number = responses.sequence
        data = text.encode()
        size = len(data)
        if not (number and 0 < size <= MAX_SHORT_TEXT_BYTES and 0 < num_tokens < 128):
            return self._tokens(0, text, num_tokens)
        responses.sequence = number + 1
        sequence = varint(number)
        response_size = size + 7 + len(sequence)
        return b"".join(
            (
                _EVENT_HEAD[self._num_around_response + response_size],
                self._head,
                _RESPONSE_HEAD[response_size],
                sequence,
                TEXT_HEAD[size],
                data,
                TEXT_TAIL[num_tokens],
            )
        )

    def _tokens(self, index: int, text: str, num_tokens: int) -> bytes:
        """Encode tokens without records, of any number and length, as one event."""
        return _framed(self._head, self._responses.encode_text(text, num_tokens, index))


def error_event(key: int, status: bytes) -> bytes:
    """Encode the error event that ends a failed request. `status` is a serialised
    google.rpc.Status."""
    return _framed(_key_field(key) + _ERROR, status)


def _key_field(key: int) -> bytes:
    return _KEY + varint(key) if key else b""


def _framed(head: bytes, data: bytes) -> bytes:
    """Return one event with the content `data` as an encoded field of MultiplexResponse.

    `head` is the encoded key, followed by the tag of `data`. The length of `data` is inserted after
    `head`.
    """
    event = b"".join((head, varint(len(data)), data))
    return b"".join((_EVENTS, varint(len(event)), event))


def _plain_tokens(batch: Sequence[StreamEvent]) -> TokensPiece | None:
    """Return the events of `batch` merged into one event, if they have only text of one output and
    no token records; otherwise None."""
    first = batch[0]
    if not isinstance(first, TokensPiece):
        return None
    texts: list[str] = []
    num_tokens = 0
    for piece in batch:
        if (
            not isinstance(piece, TokensPiece)
            or piece.output_index != first.output_index
            or piece.records
        ):
            return None
        texts.append(piece.text)
        num_tokens += piece.num_tokens
    return TokensPiece(first.output_index, "".join(texts), num_tokens, ())
