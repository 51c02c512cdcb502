"""Events that are encoded without protobuf have exactly the bytes that protobuf produces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.server.front.events import StreamEvent, TokenRecord, TokensPiece
from penstock.server.rpc.mapping_out import ResponseEncoder, varint
from penstock.server.rpc.multiplex_encoding import MultiplexEncoder, error_event
from penstock.v1 import generation_service_pb2 as pb

MAX_BYTES = 1 << 20
uint64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
pieces = st.builds(
    TokensPiece,
    st.one_of(st.just(0), st.integers(0, 300)),
    texts,
    st.one_of(st.integers(0, 2), st.integers(0, 2**32 - 1)),
    st.just(()),
)


def expected(key: int, sequence: int, piece: TokensPiece) -> pb.MultiplexEvent:
    event = pb.MultiplexEvent(key=key)
    event.response.sequence = sequence
    event.response.tokens.SetInParent()
    event.response.tokens.output_index = piece.output_index
    event.response.tokens.text = piece.text
    event.response.tokens.num_tokens = piece.num_tokens
    return event


def encoder(key: int, sequence: int = 0, *, max_plain_chars: int = MAX_BYTES) -> MultiplexEncoder:
    responses = ResponseEncoder(MAX_BYTES)
    responses.sequence = sequence
    return MultiplexEncoder(key, responses, max_plain_chars)


@given(st.lists(st.tuples(uint64, st.integers(0, 2**63), pieces), min_size=1, max_size=5))
@example([(1, 1, TokensPiece(0, "x" * 64, 127, ()))])
@example([(2**64 - 1, 2**63, TokensPiece(0, "x" * 64, 127, ()))])
@example([(1, 1, TokensPiece(0, "x" * 65, 128, ()))])
@example([(127, 127, TokensPiece(0, "\n", 1, ())), (128, 128, TokensPiece(0, "", 0, ()))])
def test_a_piece_by_hand_is_a_piece_by_protobuf(
    entries: list[tuple[int, int, TokensPiece]],
) -> None:
    message = pb.MultiplexResponse()
    data = b""
    for key, sequence, piece in entries:
        message.events.append(expected(key, sequence, piece))
        data += b"".join(encoder(key, sequence).encode([piece]))
    assert pb.MultiplexResponse.FromString(data) == message
    assert data == message.SerializeToString()


@given(uint64, st.lists(st.tuples(st.booleans(), texts), min_size=1, max_size=8))
def test_any_batch_carries_what_generate_would_have_sent(
    key: int, entries: list[tuple[bool, str]]
) -> None:
    batch: list[StreamEvent] = [
        TokensPiece(0, text, 1, (TokenRecord(5, -0.5, 1),) if has_record else ())
        for has_record, text in entries
    ]
    alone = [
        pb.GenerateResponse.FromString(data) for data in ResponseEncoder(MAX_BYTES).encode(batch)
    ]
    shared = encoder(key)
    (event,) = pb.MultiplexResponse.FromString(b"".join(shared.encode(batch))).events
    assert event.key == key
    assert [event.response] == alone
    (after,) = pb.MultiplexResponse.FromString(b"".join(shared.encode(batch))).events
    assert after.response.sequence == 1


@given(st.integers(1, 100), texts)
def test_long_text_is_split_as_generate_would(max_bytes: int, text: str) -> None:
    batch: list[StreamEvent] = [TokensPiece(0, character, 1, ()) for character in text or "x"]
    shared = MultiplexEncoder(7, ResponseEncoder(max_bytes), max_bytes // 4)
    reported = pb.MultiplexResponse.FromString(b"".join(shared.encode(batch))).events
    assert [event.response.SerializeToString() for event in reported] == list(
        ResponseEncoder(max_bytes).encode(batch)
    )


@given(uint64, st.integers(1, 16), st.text(st.characters(exclude_categories=["Cs"])))
def test_an_error_is_the_status(key: int, code: int, text: str) -> None:
    event = pb.MultiplexEvent(key=key)
    event.error.code = code
    event.error.message = text
    data = error_event(key, event.error.SerializeToString())
    assert list(pb.MultiplexResponse.FromString(data).events) == [event]


@given(uint64)
def test_varints_are_protobufs(value: int) -> None:
    data = pb.MultiplexCancel(key=value).SerializeToString()
    assert varint(value) == (data[1:] or b"\0")
