"""Streams that the engine keeps beyond their calls have all their tokens, are kept once, and stay
within limits.
"""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, Queued, StepEvents
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec, SamplingParams
from penstock.scheduler.state import RequestState
from penstock.server.engine.kept_streams import NO_FRONT, KeptLimits, KeptStream, KeptStreams
from penstock.server.ipc.frames import Attached, KeptRequest, ResumeSpec, encode
from penstock.server.ipc.step_frames import FRONT_SHIFT, StepFrame
from penstock.server.ipc.wire import MAX_FRAME_BYTES
from support.core import FakeClock

RESUME_TIMEOUT_S = 10.0


class Store:
    """A store of streams, its clock, and the names of the streams that it dropped."""

    def __init__(self, *, max_bytes: int = 1 << 20, max_unread: int = 100) -> None:
        self.clock = FakeClock()
        self.dropped: list[str] = []
        self.kept = KeptStreams(
            self.clock,
            on_drop=lambda stream: self.dropped.append(stream.name),
            limits=KeptLimits(max_bytes=max_bytes, max_unread=max_unread),
        )

    def begin(
        self,
        name: str,
        *keys: int,
        front_id: int = 1,
        is_read: bool = True,
        num_logprobs: int = -1,
        history: StepEvents | None = None,
        tenant: str = "",
    ) -> KeptStream:
        keys = tuple(front_id << FRONT_SHIFT | key for key in keys)
        kept = KeptRequest(
            name=name,
            resume_spec=ResumeSpec(
                request_id=name,
                seed=1,
                arrival_s=0,
                deadline_s=9,
                resume_timeout_s=RESUME_TIMEOUT_S,
                message=b"m",
            ),
            keys=keys,
            tenant=tenant,
            is_read=is_read,
            history=None if history is None else StepFrame.from_events(history),
        )
        sampling = SamplingParams(num_logprobs=num_logprobs)
        prompt = np.array([5], dtype=np.int32)
        specs = tuple(
            RequestSpec(
                key=key, request_id=name, prompt_ids=prompt, max_tokens=9, sampling=sampling
            )
            for key in keys
        )
        self.kept.begin(front_id, specs, kept)
        stream = self.kept.find(name)
        assert stream is not None
        return stream

    def tokens(self, *pairs: tuple[int, int], front_id: int = 1) -> None:
        keys = [front_id << FRONT_SHIFT | key for key, _ in pairs]
        self.kept.record(
            StepEvents(
                step=1,
                at_s=1.0,
                keys=np.array(keys, dtype=np.int64),
                tokens=np.array([token for _, token in pairs], dtype=np.int32),
            )
        )

    def end(self, key: int, *, is_rejected: bool = False, front_id: int = 1) -> None:
        key |= front_id << FRONT_SHIFT
        end = (
            Failed(key=key, at_s=1.0, reason=FailureReason.QUEUE_FULL)
            if is_rejected
            else Completed(key=key, at_s=1.0, reason=FinishReason.LENGTH)
        )
        self.kept.record(StepEvents(step=1, at_s=1.0, ends=(end,)))


def tokens_of(stream: KeptStream) -> dict[int, list[int]]:
    """Return the tokens of the stream by request key, without the bits of the key that identify the
    front.
    """
    reported: dict[int, list[int]] = {}
    for events in stream.history():
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            reported.setdefault(key % 2**FRONT_SHIFT, []).append(token)
    return reported


def test_a_stream_has_its_tokens_between_what_else_happened() -> None:
    store = Store()
    stream = store.begin("a", 1)
    key = stream.keys[0]
    queued = Queued(key=key, at_s=1.0, num_ahead=0, estimated_queue_s=None)
    admitted = Admitted(key=key, at_s=1.0, num_cached_tokens=0, num_preemptions=0)
    store.kept.record(StepEvents(step=0, at_s=1.0, changes=(queued, admitted)))
    for token in (7, 8):
        store.tokens((1, token), (2, 99))
    store.end(1)
    first, second, tokens, last = stream.history()
    assert (first.changes, second.changes) == ((queued,), (admitted,))
    assert tokens.tokens.tolist() == [7, 8]
    assert last.ends[0].key == key
    assert store.kept.state_of("a") is RequestState.COMPLETED


def test_log_probabilities_are_those_of_the_request_and_no_more() -> None:
    store = Store()
    stream = store.begin("a", 1, num_logprobs=1)
    rows = TokenLogprobs(
        chosen=np.array([-1.0, -2.0], np.float32),
        ranks=np.array([1, 2], np.int32),
        top_ids=np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        top_logprobs=np.zeros((2, 3), np.float32),
    )
    keys = np.array([2, 1], dtype=np.int64) + (1 << FRONT_SHIFT)
    step = StepEvents(step=1, at_s=1.0, keys=keys, tokens=np.array([8, 9], np.int32), logprobs=rows)
    store.kept.record(step)
    (updates,) = stream.history()
    assert updates.logprobs is not None
    assert (updates.logprobs.chosen.tolist(), updates.logprobs.top_ids.tolist()) == ([-2.0], [[4]])


def test_output_of_an_earlier_engine_comes_first() -> None:
    store = Store()
    key = 1 << FRONT_SHIFT | 1
    history = StepEvents(
        step=0, at_s=0.0, keys=np.array([key, key]), tokens=np.array([3, 4], np.int32)
    )
    stream = store.begin("a", 1, history=history)
    store.tokens((1, 5))
    assert tokens_of(stream) == {1: [3, 4, 5]}


def test_streams_of_a_lost_front_are_kept_for_the_resume_timeout() -> None:
    store = Store()
    store.begin("a", 1)
    store.begin("b", 1, front_id=2)
    (lost,) = store.kept.front_disconnected(1)
    assert (lost.name, lost.front_id) == ("a", NO_FRONT)
    assert store.kept.moved == {lost.keys[0]: NO_FRONT}
    store.clock.now_s += RESUME_TIMEOUT_S - 0.1
    store.kept.sweep()
    assert store.kept.find("a") is lost
    store.kept.move(lost, 2)
    assert store.kept.moved == {lost.keys[0]: 2}
    store.clock.now_s += RESUME_TIMEOUT_S
    store.kept.sweep()
    assert store.kept.find("a") is lost, "whoever reads it keeps it"
    store.kept.detach("a", 1)
    assert lost.is_read, "another front has it"
    store.kept.detach("a", 2)
    store.clock.now_s += RESUME_TIMEOUT_S
    store.kept.sweep()
    assert (store.dropped, store.kept.moved) == (["a"], {})


def test_requests_that_the_engine_rejected_are_not_kept() -> None:
    store = Store()
    store.begin("a", 1)
    store.end(1, is_rejected=True)
    assert (len(store.kept), store.kept.num_bytes) == (0, 0)


def test_the_streams_unread_for_longest_are_dropped_first() -> None:
    store = Store(max_unread=2)
    for number, name in enumerate("abc", start=1):
        store.begin(name, number)
    for name in "bac":
        store.kept.detach(name, 1)
    assert store.dropped == ["b"]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_request_of_the_tenant_with_most_bytes_is_dropped(is_read: bool) -> None:
    store = Store(max_bytes=20_000, max_unread=8)
    small = store.begin("small", 1, tenant="small")
    store.kept.detach("small", 1)
    for number in range(2, 30):
        store.begin(str(number), number, tenant="large")
        if not is_read:
            store.kept.detach(str(number), 1)
        assert store.kept.num_bytes <= 20_000
    assert store.kept.find("small") is small
    assert not small.is_lost
    dropped = [] if is_read else [str(number) for number in range(2, 23)]
    assert store.dropped == dropped, "the longest unread of the other"


@pytest.mark.parametrize("num_logprobs", [-1, 0, 1, 20])
def test_the_bytes_that_count_are_those_of_the_memory(num_logprobs: int) -> None:
    store = Store()
    store.begin("a", 1, num_logprobs=num_logprobs)
    key = np.array([1 << FRONT_SHIFT | 1], dtype=np.int64)
    num_top = max(num_logprobs, 0)
    tracemalloc.start()
    try:
        had, counted = tracemalloc.get_traced_memory()[0], store.kept.num_bytes
        for token in range(300):
            row = TokenLogprobs(
                chosen=np.zeros(1, np.float32),
                ranks=np.zeros(1, np.int32),
                top_ids=np.zeros((1, num_top), np.int32),
                top_logprobs=np.zeros((1, num_top), np.float32),
            )
            tokens = np.array([token], np.int32)
            store.kept.record(
                StepEvents(step=token, at_s=1.0, keys=key, tokens=tokens, logprobs=row)
            )
            if token % 30 == 0:
                store.kept.record(
                    StepEvents(step=token, at_s=1.0, changes=(Preempted(key=int(key[0]), at_s=1),))
                )
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - had
    finally:
        tracemalloc.stop()
    assert grown <= 1.2 * (store.kept.num_bytes - counted) + 2000


def test_the_history_of_the_longest_stream_is_dropped_if_all_are_read() -> None:
    store = Store(max_bytes=3600)
    first, second = store.begin("a", 1), store.begin("b", 2)
    for _ in range(60):
        store.tokens((2, 7))
    assert (first.is_lost, second.is_lost) == (False, True)
    assert store.dropped == []
    assert store.kept.num_bytes <= 3600
    store.end(2)
    assert store.kept.state_of("b") is RequestState.COMPLETED


actions = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 6)),
        st.tuples(st.just("tokens"), st.integers(1, 6)),
        st.tuples(st.just("end"), st.integers(1, 6)),
        st.tuples(st.just("detach"), st.integers(1, 6)),
        st.tuples(st.just("attach"), st.integers(1, 6)),
        st.tuples(st.just("gone"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 12)),
    ),
    max_size=60,
)


class Model:
    """Runs actions on a store, and records the expected content of each stream. Each stream has one
    request key.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reported: dict[str, tuple[int, list[int]]] = {}
        self._next_key = 100

    def do(self, number: int, what: str, which: int) -> None:
        kept, name = self.store.kept, str(which)
        stream = kept.find(name)
        if what == "begin" and stream is None:
            self._next_key += 1
            self.reported[name] = (self._next_key, [])
            self.store.begin(name, self._next_key, tenant=str(which % 2))
        elif what == "tokens":
            self._tokens(number)
        elif what == "end" and stream is not None and stream.live:
            self.store.end(self.reported[name][0])
        elif what == "attach" and stream is not None:
            kept.move(stream, 1)
        elif what == "wait":
            self.store.clock.now_s += which
            kept.sweep()
        elif what == "detach":
            kept.detach(name, 1)
        elif what == "gone":
            kept.front_disconnected(1)

    def _tokens(self, token: int) -> None:
        """Report a token for every request. Expect it only in the streams of requests that are
        still live.
        """
        for name, (key, ids) in self.reported.items():
            stream = self.store.kept.find(name)
            if stream is not None and 1 << FRONT_SHIFT | key in stream.live:
                ids.append(token)
        self.store.tokens(*((key, token) for key, _ in self.reported.values()))

    def check(self) -> list[KeptStream]:
        found = [stream for name in self.reported if (stream := self.store.kept.find(name))]
        for stream in found:
            key, ids = self.reported[stream.name]
            assert stream.is_lost or tokens_of(stream) == ({key: ids} if ids else {})
        return found


@settings(max_examples=60, deadline=None)
@given(actions=actions, max_bytes=st.integers(1500, 12000), max_unread=st.integers(1, 4))
def test_every_token_is_kept_once_within_the_bounds(
    actions: list[tuple[str, int]], max_bytes: int, max_unread: int
) -> None:
    model = Model(Store(max_bytes=max_bytes, max_unread=max_unread))
    kept = model.store.kept
    for number, (what, which) in enumerate(actions):
        model.do(number, what, which)
        streams = model.check()
        assert sum(not stream.is_read for stream in streams) <= max_unread
        assert kept.num_bytes == sum(stream.num_bytes for stream in streams)
        assert kept.num_bytes <= max_bytes


@pytest.mark.parametrize(("num_tokens", "is_lost"), [(4_800_000, False), (5_000_000, True)])
def test_a_stream_fits_into_the_frame_that_attaches_it(num_tokens: int, is_lost: bool) -> None:
    store = Store(max_bytes=1 << 28)
    keys = np.full(num_tokens, 1 << FRONT_SHIFT | 1, dtype=np.int64)
    tokens = np.zeros(num_tokens, dtype=np.int32)
    history = StepEvents(step=1, at_s=1.0, keys=keys, tokens=tokens)
    stream = store.begin("a", 1, history=history)
    assert stream.is_lost == is_lost
    frame = Attached(
        ticket=1,
        resume_spec=stream.resume_spec,
        history=tuple(map(StepFrame.from_events, stream.history())),
    )
    assert len(encode(frame)) <= MAX_FRAME_BYTES


@pytest.mark.parametrize("is_kept", [True, False])
def test_tokens_of_requests_without_a_kept_stream_are_ignored(is_kept: bool) -> None:
    store = Store()
    if is_kept:
        store.begin("a", 1)
    store.tokens((5, 5))
    assert len(store.kept) == is_kept
