"""Frames are unchanged by encoding and decoding; invalid frames are rejected."""

import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.events import Failed, StepEvents
from penstock.scheduler.request import Constraint, ConstraintKind, FailureReason, RequestSpec
from penstock.server.ipc.control_frames import FROM_CHILD, TO_CHILD, FromChild, ToChild
from penstock.server.ipc.frames import Frame, Submit, SubmitFrame, decode, encode
from penstock.server.ipc.step_frames import split_by_front
from penstock.server.ipc.wire import MAX_FRAME_BYTES, VERSION, Codec, FrameBuffer, FrameError
from penstock.server.observe import frames as observer_frames
from penstock.server.observe.frames import ObserverFrame
from support.examples import fewer_examples
from support.frame_draws import FRAMES, drawn, steps

FORGERY: Codec[Any] = Codec(Any)
"""Encodes invalid frames, which `encode` cannot produce."""


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif is_dataclass(left) or isinstance(left, msgspec.Struct):
        names = (
            left.__struct_fields__
            if isinstance(left, msgspec.Struct)
            else [item.name for item in fields(left)]
        )
        for name in names:
            assert_same(getattr(left, name), getattr(right, name))
    else:
        assert left == right


def body_of(frame: Frame) -> bytes:
    (body,) = FrameBuffer().feed(encode(frame))
    return body


def there_and_back(frame: Frame) -> Frame:
    return decode(body_of(frame))


@given(FRAMES)
def test_every_frame_survives_a_round_trip(frame: Frame) -> None:
    assert_same(there_and_back(frame), frame)


@given(drawn(ObserverFrame))
def test_every_frame_to_and_from_the_observer_survives_a_round_trip(frame: ObserverFrame) -> None:
    (body,) = FrameBuffer().feed(observer_frames.encode(frame))
    assert observer_frames.decode(body) == frame


@given(drawn(FromChild), drawn(ToChild))
def test_every_frame_between_supervisor_and_child_survives_a_round_trip(
    up: FromChild, down: ToChild
) -> None:
    (above,), (below,) = (
        FrameBuffer().feed(data) for data in (FROM_CHILD.encode(up), TO_CHILD.encode(down))
    )
    assert (FROM_CHILD.decode(above), TO_CHILD.decode(below)) == (up, down)


@given(st.lists(FRAMES, max_size=4), st.randoms(use_true_random=False))
def test_frames_are_read_from_any_split_of_the_bytes(frames: list[Frame], random: Any) -> None:
    data = b"".join(map(encode, frames))
    buffer = FrameBuffer()
    found: list[Frame] = []
    while data:
        size = random.randint(1, 40)
        found.extend(decode(body) for body in buffer.feed(data[:size]))
        data = data[size:]
    assert_same(tuple(found), tuple(frames))


@given(FRAMES, st.data())
def test_a_frame_that_is_cut_or_too_long_is_rejected(frame: Frame, data: st.DataObject) -> None:
    body = body_of(frame)
    with pytest.raises(FrameError, match="malformed"):
        decode(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(FrameError, match="malformed"):
        decode(body + b"\0")


@given(FRAMES, st.data())
def test_a_frame_that_is_damaged_is_a_frame_or_rejected(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(body_of(frame))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        decode(bytes(body))
    except FrameError:
        return


TAG = b"\x93\xa6Submit"
"""An array of three whose first item is the name of a frame."""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xa1\xff",
        b"\x91\xa4Nono",
        b"\x91" * 1_000_000,
        TAG + b"\x91" * 1_000_000,
        TAG + b"\x81\xaaprompt_ids" + b"\x91" * 1_000_000,
        TAG + b"\xdd\xff\xff\xff\xff",
        TAG + b"\xc6\xff\xff\xff\xff",
        TAG + b"\x81\xaarequest_id\xa1\xff",
        b"\x93\xabFrontHello\0\0",
    ],
)
def test_malformed_bodies_are_rejected(body: bytes) -> None:
    with pytest.raises(FrameError, match="malformed"):
        decode(body)


@pytest.mark.parametrize("front_id", [0, 2**31])
def test_a_front_id_out_of_range_is_rejected(front_id: int) -> None:
    (body,) = FrameBuffer().feed(FORGERY.encode(["FrontHello", front_id]))
    with pytest.raises(FrameError, match="int"):
        decode(body)


def test_a_foreign_version_is_rejected() -> None:
    with pytest.raises(FrameError, match="version"):
        list(FrameBuffer().feed(struct.pack("<IB", 0, VERSION + 1)))


def test_an_oversized_frame_is_rejected_before_its_body() -> None:
    with pytest.raises(FrameError, match="at most"):
        list(FrameBuffer().feed(struct.pack("<IB", MAX_FRAME_BYTES + 1, VERSION)))


def test_an_oversized_frame_is_not_written() -> None:
    with pytest.raises(FrameError, match="above the limit"):
        FORGERY.encode(bytes(MAX_FRAME_BYTES))


def small_spec(key: int = 1, **options: Any) -> RequestSpec:
    given = {"prompt_ids": np.zeros(1, np.int32), "max_tokens": 1, **options}
    return RequestSpec(key=key, request_id="r", **given)


def test_fields_that_outputs_share_are_encoded_once() -> None:
    prompt = np.arange(10_000, dtype=np.int32)
    schema = Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=('{"a": "' + "x" * 40_000 + '"}',))
    shared: dict[str, Any] = {
        "prompt_ids": prompt,
        "constraint": schema,
        "block_hashes": tuple(bytes([n]) * 16 for n in range(200)),
    }
    made = tuple(small_spec(key, **shared) for key in (1, 2, 3))
    assert len(encode(Submit(specs=made))) < 1.1 * (prompt.nbytes + 40_000)
    submit = there_and_back(Submit(specs=made))
    assert isinstance(submit, Submit)
    assert submit.specs[0].prompt_ids is submit.specs[2].prompt_ids
    assert submit.specs[0].constraint is submit.specs[2].constraint


class ReadHashes(tuple[bytes, ...]):
    """A tuple of hashes that counts how often it is iterated over."""

    num_reads = 0

    def __iter__(self) -> Iterator[bytes]:
        self.num_reads += 1
        return super().__iter__()


def test_fields_that_outputs_share_are_checked_once() -> None:
    hashes = ReadHashes([bytes(DIGEST_BYTES)] * 3)
    leader = small_spec(1, block_hashes=hashes)
    others = (replace(leader, key=key, leader_key=1, output_index=key - 1) for key in range(2, 17))
    SubmitFrame.from_submit(Submit(specs=(leader, *others)))
    assert hashes.num_reads == 1


@pytest.mark.parametrize(
    "options", [{"trace_id": bytes(15)}, {"trace_id": bytes(17)}, {"block_hashes": (bytes(17),)}]
)
def test_an_id_or_a_digest_of_another_length_is_rejected_at_either_end(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="must be 16 bytes long"):
        encode(Submit(specs=(small_spec(**options),)))
    (body,) = FrameBuffer().feed(FORGERY.encode(SubmitFrame(small_spec(**options), ())))
    with pytest.raises(FrameError, match="must be 16 bytes long"):
        decode(body)


def test_a_key_that_is_not_positive_is_rejected() -> None:
    body = body_of(Submit(specs=(small_spec(key=2**62),)))
    forged = body.replace(struct.pack(">Q", 2**62), struct.pack(">Q", 0), 1)
    with pytest.raises(FrameError, match="key must be"):
        decode(forged)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ((bytes(16), bytes(4), None), "1 tokens for 2 keys"),
        ((bytes(15), bytes(8), None), "multiple"),
        ((3, bytes(8), None), "bytes"),
        ((bytes(8), bytes(4), [1, b"", b"", b"", b""]), "0 logprobs for 1 tokens"),
        ((bytes(8), bytes(4), [1, bytes(4), b"", bytes(4), bytes(4)]), "different lengths"),
        ((bytes(8), bytes(4), [2, bytes(4), bytes(4), bytes(4), bytes(8)]), "reshape"),
        ((bytes(8), bytes(4), [-1, bytes(4), bytes(4), bytes(4), bytes(4)]), "different lengths"),
    ],
)
def test_columns_of_a_step_that_do_not_fit_are_rejected(
    columns: tuple[Any, ...], problem: str
) -> None:
    (body,) = FrameBuffer().feed(FORGERY.encode(["Step", 1, 0.0, *columns, [], [], []]))
    with pytest.raises(FrameError, match=problem):
        decode(body)


@pytest.mark.parametrize("rows", [([[]], []), ([], [[]])])
def test_a_change_or_an_end_of_no_kind_is_rejected(rows: tuple[Any, Any]) -> None:
    (body,) = FrameBuffer().feed(FORGERY.encode(["Step", 1, 0.0, b"", b"", None, [], *rows]))
    with pytest.raises(FrameError, match="an empty"):
        decode(body)


def test_details_for_the_engines_log_are_not_sent() -> None:
    end = Failed(key=1, at_s=0.0, reason=FailureReason.EXECUTOR_REQUEST_FAILED)
    logged = replace(end, request_id="r", trace_id=b"t" * 16, detail="secret")
    events = there_and_back(StepEvents(step=1, at_s=0.0, ends=(logged,)))
    assert isinstance(events, StepEvents)
    assert events.ends == (end,)


def test_numpy_numbers_are_encoded_as_numbers() -> None:
    number: Any = np.int64(1)
    end = Failed(key=number, at_s=np.float64(2.5), reason=FailureReason.QUEUE_FULL)
    tokens: Any = np.array([7], dtype=np.int64)
    step = StepEvents(step=1, at_s=0.0, keys=np.array([1]), tokens=tokens, ends=(end,))
    events = there_and_back(step)
    assert isinstance(events, StepEvents)
    assert_same(events.tokens, tokens.astype(np.int32))
    assert_same(events.ends, (Failed(key=1, at_s=2.5, reason=FailureReason.QUEUE_FULL),))


FRONT_KEYS = st.builds(
    lambda front, counter: front << 32 | counter, st.integers(1, 3), st.integers(0, 5)
)


@fewer_examples(20)
@given(steps(FRONT_KEYS))
def test_every_front_gets_its_own_events_in_order(events: StepEvents) -> None:
    split = dict(split_by_front(events))
    assert not events.is_empty or not split
    for front, updates in split.items():
        assert not updates.is_empty
        mine = events.keys >> 32 == front
        assert_same(updates.keys, events.keys[mine])
        assert_same(updates.tokens, events.tokens[mine])
        assert updates.changes == tuple(c for c in events.changes if c.key >> 32 == front)
        assert updates.ends == tuple(end for end in events.ends if end.key >> 32 == front)
        prompts = tuple(p for p in events.prompt_logprobs if p[0] >> 32 == front)
        assert_same(updates.prompt_logprobs, prompts)
        if events.logprobs is not None and mine.any():
            assert_same(updates.logprobs, events.logprobs.take(np.flatnonzero(mine)))
    total = sum(len(n.keys) + len(n.changes) + len(n.ends) for n in split.values())
    assert total == len(events.keys) + len(events.changes) + len(events.ends)
