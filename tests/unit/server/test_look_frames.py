"""What an observer asks of an engine: frames, the dispatcher's answers, the hub over a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.events import WaitReason
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.link.dispatch import Dispatcher
from penstock.server.link.frames import Cancel, Frame, FrontHello, ObserverHello, decode, encode
from penstock.server.link.fronts import FrontHub
from penstock.server.link.look_frames import Look, LookAnswer, Order, OrderAnswer, OrderVerb
from penstock.server.link.ports import EngineHello
from penstock.server.link.wire import FrameBuffer, LinkError
from support.link import FakeEngine, hello

U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**63)
TEXTS = st.text(max_size=20)
VIEWS: st.SearchStrategy[LiveView] = st.builds(
    LiveView,
    key=I64,
    request_id=TEXTS,
    tenant=TEXTS,
    output_index=st.integers(0, 2**31 - 1),
    state=st.sampled_from(RequestState),
    priority=I64,
    arrival_s=st.floats(allow_nan=False),
    deadline_s=st.floats(allow_nan=False),
    num_prompt_tokens=COUNTS,
    num_output_tokens=COUNTS,
    num_computed_tokens=COUNTS,
    num_blocks=COUNTS,
    num_preemptions=COUNTS,
    slot=st.integers(-1, 2**31 - 1),
    waits_for=st.none() | st.sampled_from(WaitReason),
    queue_position=st.none() | st.integers(0, 2**31),
    trace_id=st.just(b"") | st.binary(min_size=16, max_size=16),
)
FRAMES: st.SearchStrategy[Any] = st.one_of(
    st.just(ObserverHello()),
    st.builds(Look, ticket=U32),
    st.builds(LookAnswer, ticket=U32, views=st.lists(VIEWS, max_size=3).map(tuple)),
    st.builds(Order, ticket=U32, verb=st.sampled_from(OrderVerb), argument=TEXTS),
    st.builds(OrderAnswer, ticket=U32, problem=TEXTS, payload=st.binary(max_size=40)),
)
ORDER = Order(ticket=5, verb=OrderVerb.PROFILE, argument="0.5")


def parts(frame: Frame) -> tuple[int, bytes]:
    ((kind, body),) = FrameBuffer().feed(encode(frame))
    return kind, body


@given(FRAMES)
def test_every_frame_is_read_as_it_was_written(frame: Frame) -> None:
    assert decode(*parts(frame)) == frame


@given(FRAMES.filter(lambda frame: not isinstance(frame, ObserverHello)), st.data())
def test_a_frame_that_is_cut_is_refused(frame: Frame, data: st.DataObject) -> None:
    kind, body = parts(frame)
    with pytest.raises(LinkError):
        decode(kind, body[: data.draw(st.integers(0, len(body) - 1))])


class LookedInto(FakeEngine):
    """Has one request."""

    def look(self) -> tuple[LiveView, ...]:
        return (VIEW,)


VIEW = LiveView(
    key=1,
    request_id="a",
    tenant="t",
    output_index=0,
    state=RequestState.PENDING,
    priority=0,
    arrival_s=1.0,
    deadline_s=float("inf"),
    num_prompt_tokens=3,
    num_output_tokens=0,
    num_computed_tokens=0,
    num_blocks=0,
    num_preemptions=0,
    waits_for=WaitReason.SLOTS,
    queue_position=0,
)


def test_a_dispatcher_without_hands_says_so() -> None:
    answers: list[bytes] = []
    dispatcher = Dispatcher(LookedInto(), hello())
    dispatcher.observe(*parts(ORDER), answers.append)
    ((kind, body),) = FrameBuffer().feed(answers[0])
    assert decode(kind, body) == OrderAnswer(ticket=5, problem="it takes no orders")


def test_an_observer_may_only_look_and_order() -> None:
    dispatcher = Dispatcher(LookedInto(), hello())
    cancel = Cancel(keys=np.zeros(1, dtype=np.int64), reason=FinishReason.CANCELLED)
    answers: list[bytes] = []
    with pytest.raises(LinkError, match="an observer does not send Cancel"):
        dispatcher.observe(*parts(cancel), answers.append)
    assert answers == []


class Observed:
    """A hub that the test polls, and an observer's socket to it."""

    def __init__(self, listener: socket.socket, dispatcher: Dispatcher) -> None:
        self._listener = listener
        self.hub = FrontHub(listener, dispatcher)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(listener.getsockname())
        self.socket.settimeout(20.0)
        self._frames = FrameBuffer()
        self._ready: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.socket.sendall(encode(frame))
        self.hub.poll(20.0)

    def next(self) -> Frame:
        while not self._ready:
            data = self.socket.recv(1 << 16)
            assert data, "the engine hung up"
            self._ready += [decode(kind, body) for kind, body in self._frames.feed(data)]
        return self._ready.pop(0)

    def close(self) -> None:
        self.socket.close()
        self.hub.close()
        self._listener.close()


def observed(tmp_path: Any, carry_out: Callable[..., None]) -> Observed:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "engine.sock"))
    listener.listen(1)
    made = Observed(listener, Dispatcher(LookedInto(), hello(), carry_out=carry_out))
    made.hub.poll(20.0)  # accepted
    return made


def test_an_observer_looks_over_the_link_and_is_no_front(tmp_path: Any) -> None:
    link = observed(tmp_path, lambda order, answer: None)
    link.send(ObserverHello())
    assert isinstance(link.next(), EngineHello)
    assert link.hub.num_fronts == 0
    link.send(Look(ticket=8))
    link.hub.poll(20.0)
    assert link.next() == LookAnswer(ticket=8, views=(VIEW,))
    link.close()


def test_an_answer_that_comes_later_from_another_thread_is_sent(tmp_path: Any) -> None:
    working = threading.Event()
    threads: list[threading.Thread] = []

    def carry_out(order: Order, answer: Callable[[OrderAnswer], None]) -> None:
        def work() -> None:
            assert working.wait(20.0)
            answer(OrderAnswer(ticket=order.ticket, payload=b"done"))

        threads.append(threading.Thread(target=work))
        threads[0].start()

    link = observed(tmp_path, carry_out)
    link.send(ObserverHello())
    link.next()
    link.send(ORDER)
    working.set()
    link.hub.poll(20.0)
    assert link.next() == OrderAnswer(ticket=5, payload=b"done")
    threads[0].join()
    link.close()


def test_an_answer_for_an_observer_that_left_goes_nowhere(tmp_path: Any) -> None:
    answers: list[Callable[[OrderAnswer], None]] = []
    link = observed(tmp_path, lambda order, answer: answers.append(answer))
    link.send(ObserverHello())
    link.send(ORDER)
    link.socket.close()
    link.hub.poll(20.0)
    answers[0](OrderAnswer(ticket=5))
    link.hub.poll(20.0)
    link.close()


def test_one_who_says_a_front_s_word_as_an_observer_is_dropped(tmp_path: Any) -> None:
    link = observed(tmp_path, lambda order, answer: None)
    link.send(ObserverHello())
    link.next()
    link.send(FrontHello(front_id=1))
    assert link.socket.recv(1) == b""
    link.close()
