"""Frames survive the way there and back, and what is no frame is refused."""

import struct
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.scheduler.request import (
    FailureReason,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from penstock.scheduler.request_options import CacheRetention, Constraint, ConstraintKind
from penstock.scheduler.state import RequestState
from penstock.server.link.frames import (
    Cancel,
    CancelAnswer,
    CancelById,
    Frame,
    FrameKind,
    FrontHello,
    decode,
    encode,
)
from penstock.server.link.ports import EngineHello
from penstock.server.link.spec_frames import Submit
from penstock.server.link.step_frames import split_by_front
from penstock.server.link.wire import MAX_FRAME_BYTES, VERSION, FrameBuffer, LinkError, Writer

INT32 = st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.integers(0, 2**40)
FLOATS = st.floats(allow_nan=False)
KEYS = st.integers(1, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def ids(max_size: int = 40) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int32, st.integers(1, max_size), elements=INT32)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(FLOATS),
        top_k=draw(NUMBERS),
        top_p=draw(FLOATS),
        min_p=draw(FLOATS),
        repetition_penalty=draw(FLOATS),
        presence_penalty=draw(FLOATS),
        frequency_penalty=draw(FLOATS),
        seed=draw(st.integers(0, 2**64 - 1)),
        logit_bias=tuple(draw(st.lists(st.tuples(INT32, FLOATS), max_size=4))),
        num_logprobs=draw(st.integers(-1, 20)),
        num_prompt_logprobs=draw(st.integers(-1, 20)),
    )


CONSTRAINTS = st.builds(
    Constraint,
    kind=st.just(ConstraintKind.CHOICE),
    texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=4).map(tuple),
) | st.builds(
    Constraint,
    kind=st.sampled_from(ConstraintKind),
    texts=TEXTS.filter(bool).map(lambda text: (text,)),
)
RETENTIONS = st.builds(
    CacheRetention,
    priority=st.integers(0, 100),
    duration_s=st.floats(min_value=0, exclude_min=True),
)


@st.composite
def specs(draw: st.DrawFn, previous: RequestSpec | None = None) -> RequestSpec:
    digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
    shares = previous is not None and draw(st.booleans())
    prompt_ids = previous.prompt_ids if previous and shares else draw(ids())
    like = previous if draw(st.booleans()) else None
    max_tokens = draw(st.integers(1, 2**40))
    return RequestSpec(
        key=draw(KEYS),
        request_id=draw(TEXTS),
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        num_replayed=draw(st.integers(0, min(len(prompt_ids), max_tokens) - 1)),
        sampling=draw(samplings()),
        stop_ids=tuple(draw(st.lists(INT32, max_size=5))),
        block_hashes=(
            previous.block_hashes
            if previous and shares
            else tuple(draw(st.lists(digests, max_size=4)))
        ),
        hash_salt=draw(st.binary(max_size=20)),
        leader_key=draw(st.integers(0, 2**63 - 1)),
        output_index=draw(st.integers(0, 128)),
        priority=draw(INT32),
        arrival_s=draw(FLOATS),
        ttft_deadline_s=draw(FLOATS),
        deadline_s=draw(FLOATS),
        time_limit_s=draw(FLOATS),
        adapter=like.adapter if like else draw(TEXTS),
        constraint=like.constraint if like else draw(st.none() | CONSTRAINTS),
        retention=like.retention if like else draw(st.none() | RETENTIONS),
        tenant=like.tenant if like else draw(TEXTS),
        session_id=like.session_id if like else draw(TEXTS),
    )


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    made: list[RequestSpec] = []
    for _ in range(draw(st.integers(0, 3))):
        made.append(draw(specs(made[-1] if made else None)))
    return Submit(specs=tuple(made))


@st.composite
def logprobs(draw: st.DrawFn, num_rows: int) -> TokenLogprobs:
    width = draw(st.integers(0, 4))
    values = st.floats(width=32, allow_nan=False)
    return TokenLogprobs(
        chosen=draw(hnp.arrays(np.float32, num_rows, elements=values)),
        ranks=draw(hnp.arrays(np.int32, num_rows, elements=INT32)),
        top_ids=draw(hnp.arrays(np.int32, (num_rows, width), elements=INT32)),
        top_logprobs=draw(hnp.arrays(np.float32, (num_rows, width), elements=values)),
    )


@st.composite
def steps(draw: st.DrawFn, keys: st.SearchStrategy[int] = KEYS) -> StepEvents:
    num_tokens = draw(st.integers(0, 12))
    admitted = st.builds(
        Admitted, key=keys, at_s=FLOATS, num_cached_tokens=NUMBERS, num_preemptions=NUMBERS
    )
    preempted = st.builds(Preempted, key=keys, at_s=FLOATS)
    found = st.builds(PrefixFound, key=keys, at_s=FLOATS, num_cached_tokens=NUMBERS)
    queued = st.builds(
        Queued, key=keys, at_s=FLOATS, num_ahead=NUMBERS, estimated_queue_s=st.none() | FLOATS
    )
    finished = st.builds(
        Finished, key=keys, at_s=FLOATS, reason=st.sampled_from(FinishReason), stop_id=INT32
    )
    failed = st.builds(
        Failed,
        key=keys,
        at_s=FLOATS,
        reason=st.sampled_from(FailureReason),
        estimate_s=st.none() | FLOATS,
        deadline_s=st.none() | FLOATS,
        retry_after_s=st.none() | FLOATS,
    )
    prompts = draw(st.lists(st.tuples(keys, NUMBERS, st.integers(0, 5)), max_size=2))
    return StepEvents(
        step=draw(NUMBERS),
        at_s=draw(FLOATS),
        keys=draw(hnp.arrays(np.int64, num_tokens, elements=keys)),
        tokens=draw(hnp.arrays(np.int32, num_tokens, elements=INT32)),
        logprobs=draw(st.none() | logprobs(num_tokens)),
        prompt_logprobs=tuple((key, first, draw(logprobs(n))) for key, first, n in prompts),
        changes=tuple(draw(st.lists(admitted | preempted | found | queued, max_size=4))),
        ends=tuple(draw(st.lists(finished | failed, max_size=4))),
    )


HELLOS = st.builds(
    EngineHello,
    epoch=NUMBERS,
    model=TEXTS,
    max_num_waiting=NUMBERS,
    max_num_waiting_tokens=NUMBERS,
    executor=st.builds(
        ExecutorInfo,
        name=TEXTS,
        vocab_size=NUMBERS,
        block_size=NUMBERS,
        num_blocks=NUMBERS,
        max_seq_len=NUMBERS,
        max_num_seqs=NUMBERS,
        features=st.frozensets(st.sampled_from(Feature)),
        max_prompt_tokens=st.none() | st.integers(1, 2**40),
        adapters=st.lists(TEXTS, max_size=4).map(tuple),
        is_self_paced=st.booleans(),
    ),
).flatmap(
    lambda hello: (
        st.just(hello)
        if hello.executor.is_self_paced
        else st.builds(
            lambda depth: replace(hello, executor=replace(hello.executor, pipeline_depth=depth)),
            st.integers(1, 2),
        )
    )
)
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(FrontHello, front_id=st.integers(1, 2**31 - 1)),
    HELLOS,
    submits(),
    st.builds(
        Cancel,
        keys=hnp.arrays(np.int64, st.integers(0, 9), elements=KEYS),
        reason=st.sampled_from(FinishReason),
    ),
    st.builds(CancelById, ticket=st.integers(0, 2**32 - 1), request_id=TEXTS),
    st.builds(
        CancelAnswer, ticket=st.integers(0, 2**32 - 1), state=st.sampled_from([None, *RequestState])
    ),
    steps(),
)


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


@pytest.mark.parametrize("kind", [0, 8, 255])
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


@pytest.mark.parametrize("flags", [8, 9, 24, 64, 255])
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
