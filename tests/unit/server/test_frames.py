"""Frames survive the way there and back, and what is no frame is refused."""

import struct
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.events import (
    Finished,
    Stay,
    StepEvents,
    Wait,
)
from penstock.scheduler.request import (
    FinishReason,
    RequestSpec,
)
from penstock.scheduler.request_options import CacheRetention, Constraint, ConstraintKind
from penstock.server.link.frames import (
    Frame,
    FrameKind,
    decode,
    encode,
)
from penstock.server.link.spec_frames import TRACE_ID_BYTES, Submit
from penstock.server.link.step_frames import split_by_front
from penstock.server.link.wire import MAX_FRAME_BYTES, VERSION, FrameBuffer, LinkError, Writer
from support.frame_draws import FRAMES, steps


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, tuple):
        assert isinstance(right, tuple)
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif hasattr(left, "__dataclass_fields__"):
        for item in fields(left):  # type: ignore[arg-type]  # checked in the line above
            assert_same(getattr(left, item.name), getattr(right, item.name))
    else:
        assert left == right


def there_and_back(frame: Frame) -> Frame:
    ((kind, body),) = FrameBuffer().feed(encode(frame))
    return decode(kind, body)


@given(FRAMES)
def test_every_frame_survives(frame: Frame) -> None:
    assert_same(there_and_back(frame), frame)


@given(st.lists(FRAMES, max_size=4), st.randoms(use_true_random=False))
def test_frames_are_found_however_the_bytes_are_cut(frames: list[Frame], random: object) -> None:
    data = b"".join(map(encode, frames))
    buffer = FrameBuffer()
    found: list[Frame] = []
    while data:
        size = random.randint(1, 40)  # type: ignore[attr-defined]  # hypothesis gives a Random
        found.extend(decode(kind, body) for kind, body in buffer.feed(data[:size]))
        data = data[size:]
    assert_same(tuple(found), tuple(frames))


@given(FRAMES, st.data())
def test_a_truncated_body_is_refused(frame: Frame, data: st.DataObject) -> None:
    ((kind, body),) = FrameBuffer().feed(encode(frame))
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(LinkError):
        decode(kind, body[:cut])


@given(FRAMES)
def test_bytes_left_over_are_refused(frame: Frame) -> None:
    ((kind, body),) = FrameBuffer().feed(encode(frame))
    with pytest.raises(LinkError):
        decode(kind, body + b"\0")


@given(st.sampled_from(FrameKind), st.binary(max_size=200))
def test_noise_is_a_frame_or_a_link_error(kind: FrameKind, body: bytes) -> None:
    try:
        decode(kind, body)
    except LinkError:
        return


@pytest.mark.parametrize("kind", [0, 99, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(LinkError, match=f"kind {kind}"):
        decode(kind, b"")


def test_a_foreign_version_is_refused() -> None:
    frame = struct.pack("<IBBH", 0, VERSION + 1, FrameKind.CANCEL, 0)
    with pytest.raises(LinkError, match="version"):
        list(FrameBuffer().feed(frame))


def test_an_oversized_frame_is_refused_before_its_body() -> None:
    header = struct.pack("<IBBH", MAX_FRAME_BYTES + 1, VERSION, FrameKind.SUBMIT, 0)
    with pytest.raises(LinkError, match="at most"):
        list(FrameBuffer().feed(header))


def test_an_oversized_frame_is_not_written() -> None:
    out = Writer()
    out.blob(bytes(MAX_FRAME_BYTES))
    with pytest.raises(LinkError, match="above the limit"):
        out.frame(FrameKind.SUBMIT)


def test_a_shared_prompt_travels_once() -> None:
    prompt = np.arange(10_000, dtype=np.int32)
    made = tuple(
        RequestSpec(key=key, request_id="r", prompt_ids=prompt, max_tokens=1) for key in (1, 2, 3)
    )
    assert len(encode(Submit(specs=made))) < 1.1 * prompt.nbytes
    submit = there_and_back(Submit(specs=made))
    assert isinstance(submit, Submit)
    assert submit.specs[0].prompt_ids is submit.specs[2].prompt_ids


def small_spec(key: int = 1, **options: Any) -> RequestSpec:
    return RequestSpec(
        key=key, request_id="r", prompt_ids=np.zeros(1, np.int32), max_tokens=1, **options
    )


def test_rare_options_cost_nothing_where_they_are_absent() -> None:
    def size(**options: Any) -> int:
        return len(encode(Submit(specs=(small_spec(**options),))))

    adapter = "a" * 100
    form = Constraint(kind=ConstraintKind.REGEX, texts=("b" * 100,))
    # What each adds: its own bytes and their lengths. A byte for "none of them" is in all.
    assert size(adapter=adapter) - size() == 4 + 100
    assert size(constraint=form) - size() == 1 + 4 + 4 + 100
    assert size(retention=CacheRetention()) - size() == 1 + 8
    assert size(trace_id=bytes(TRACE_ID_BYTES)) - size() == 4 + TRACE_ID_BYTES
    assert size(adapter=adapter, constraint=form) == size(adapter=adapter) + 1 + 4 + 4 + 100


def test_a_shared_form_travels_once() -> None:
    form = Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=('{"a": "' + "x" * 10_000 + '"}',))
    kept = CacheRetention(priority=1, duration_s=2.0)
    made = tuple(small_spec(key, constraint=form, adapter="poet", retention=kept) for key in (1, 2))
    other = small_spec(3, constraint=form)
    frame = Submit(specs=(*made, other, small_spec(4)))
    assert len(encode(frame)) < 2.2 * 10_000
    submit = there_and_back(frame)
    assert isinstance(submit, Submit)
    assert_same(submit, frame)
    assert submit.specs[1].constraint is submit.specs[0].constraint


@pytest.mark.parametrize("flags", [8, 9, 24, 72, 128, 255])
def test_options_that_mean_nothing_are_refused(flags: int) -> None:
    plain, full = (
        encode(Submit(specs=(small_spec(adapter=adapter),))) for adapter in ("", "a" * 50)
    )
    at = next(i for i, (a, b) in enumerate(zip(plain, full, strict=False)) if a != b and i > 8)
    assert (plain[at], full[at]) == (0, 1)
    forged = plain[:at] + bytes([flags]) + plain[at + 1 :]
    ((kind, body),) = FrameBuffer().feed(forged)
    with pytest.raises(LinkError, match="options"):
        decode(kind, body)


@pytest.mark.parametrize("num_bytes", [1, 15, 17, 32])
def test_a_trace_id_of_another_length_is_refused(num_bytes: int) -> None:
    with pytest.raises(LinkError, match=f"trace_id must be 16 bytes long, not {num_bytes}"):
        encode(Submit(specs=(small_spec(trace_id=bytes(num_bytes)),)))


def test_outputs_of_one_request_share_its_trace() -> None:
    trace_id = bytes(range(TRACE_ID_BYTES))
    one, two = (
        encode(Submit(specs=tuple(small_spec(key, trace_id=trace_id) for key in keys)))
        for keys in ((1,), (1, 2))
    )
    submit = there_and_back(Submit(specs=(small_spec(trace_id=trace_id),) * 2))
    assert isinstance(submit, Submit)
    assert [spec.trace_id for spec in submit.specs] == [trace_id, trace_id]
    assert two.count(trace_id) == one.count(trace_id) == 1


def test_what_did_not_wait_nor_run_costs_nothing() -> None:
    def size(**account: Any) -> int:
        end = Finished(key=1, at_s=0.0, reason=FinishReason.STOP, **account)
        return len(encode(StepEvents(step=1, at_s=0.0, ends=(end,))))

    assert size(wait=Wait()) - size() == 5 * 8 + 4
    assert size(stay=Stay()) - size() == 4 * 4


def test_flags_that_mean_nothing_are_refused() -> None:
    end = Finished(key=1, at_s=0.0, reason=FinishReason.STOP)
    plain, full = (
        encode(StepEvents(step=1, at_s=0.0, ends=(replace(end, stay=stay),)))
        for stay in (None, Stay())
    )
    at = next(i for i, (a, b) in enumerate(zip(plain, full, strict=False)) if a != b and i > 8)
    forged = plain[:at] + bytes([plain[at] | 64]) + plain[at + 1 :]
    ((kind, body),) = FrameBuffer().feed(forged)
    with pytest.raises(LinkError, match="flags"):
        decode(kind, body)


FRONT_KEYS = st.builds(
    lambda front, counter: front << 32 | counter, st.integers(1, 3), st.integers(0, 5)
)


@given(steps(FRONT_KEYS))
def test_every_front_gets_its_own_news_in_order(events: StepEvents) -> None:
    split = dict(split_by_front(events))
    assert not events.is_empty or not split
    for front, news in split.items():
        assert not news.is_empty
        mine = events.keys >> 32 == front
        assert_same(news.keys, events.keys[mine])
        assert_same(news.tokens, events.tokens[mine])
        assert news.changes == tuple(c for c in events.changes if c.key >> 32 == front)
        assert news.ends == tuple(end for end in events.ends if end.key >> 32 == front)
        prompts = tuple(p for p in events.prompt_logprobs if p[0] >> 32 == front)
        assert_same(news.prompt_logprobs, prompts)
        if events.logprobs is not None and mine.any():
            assert_same(news.logprobs, events.logprobs.take(np.flatnonzero(mine)))
    total = sum(len(n.keys) + len(n.changes) + len(n.ends) for n in split.values())
    assert total == len(events.keys) + len(events.changes) + len(events.ends)
