"""How an engine answers the observer's commands, tested at the dispatcher and over a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.scheduler.events import WaitReason
from penstock.scheduler.output_view import OutputView
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.ipc.frames import (
    Cancel,
    Command,
    CommandResult,
    EngineHello,
    Frame,
    FrontHello,
    ObserverHello,
    Profile,
    ViewAnswer,
    ViewQuery,
    decode,
    encode,
)
from penstock.server.ipc.wire import FrameBuffer, FrameError
from support.link import KEPT_LIMITS, FakeEngine, hello
from support.timeout import TEST_TIMEOUT_S

ORDER = Command(ticket=5, action=Profile(seconds=0.5))


class ObservedEngine(FakeEngine):
    """An engine with one live request."""

    def output_views(self) -> tuple[OutputView, ...]:
        return (VIEW,)


VIEW = OutputView(
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


def test_a_dispatcher_without_operator_functions_reports_it() -> None:
    answers: list[bytes] = []
    dispatcher = Dispatcher(ObservedEngine(), hello(), kept_limits=KEPT_LIMITS)
    dispatcher.handle_observer_frame(ORDER, answers.append)
    (body,) = FrameBuffer().feed(answers[0])
    assert decode(body) == CommandResult(ticket=5, problem="this engine accepts no commands")


def test_an_observer_cannot_cancel_requests() -> None:
    dispatcher = Dispatcher(ObservedEngine(), hello(), kept_limits=KEPT_LIMITS)
    cancel = Cancel(keys=np.zeros(1, dtype=np.int64), reason=FinishReason.CANCELLED)
    answers: list[bytes] = []
    with pytest.raises(FrameError, match="unexpected frame from an observer: Cancel"):
        dispatcher.handle_observer_frame(cancel, answers.append)
    assert answers == []


class Observed:
    """The engine's connections, which the test polls, and the observer's end of one connection."""

    def __init__(self, listener: socket.socket, dispatcher: Dispatcher) -> None:
        self._listener = listener
        self.connections = FrontConnections(listener, dispatcher)
        self.connect()

    def connect(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(self._listener.getsockname())
        self.socket.settimeout(TEST_TIMEOUT_S)
        self._frames = FrameBuffer()
        self._ready: list[Frame] = []
        self.connections.poll(20.0)  # accepted

    def send(self, frame: Frame) -> None:
        self.socket.sendall(encode(frame))
        self.connections.poll(TEST_TIMEOUT_S)

    def next(self) -> Frame:
        while not self._ready:
            data = self.socket.recv(1 << 16)
            assert data, "the engine hung up"
            self._ready += [decode(body) for body in self._frames.feed(data)]
        return self._ready.pop(0)

    def close(self) -> None:
        self.socket.close()
        self.connections.close()
        self._listener.close()


def observed(tmp_path: Any, execute: Callable[..., None]) -> Observed:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "engine.sock"))
    listener.listen(1)
    return Observed(
        listener,
        Dispatcher(ObservedEngine(), hello(), kept_limits=KEPT_LIMITS, execute=execute),
    )


def test_an_observer_queries_live_requests_and_is_not_counted_as_a_front(tmp_path: Any) -> None:
    link = observed(tmp_path, lambda order, answer: None)
    link.send(ObserverHello())
    assert isinstance(link.next(), EngineHello)
    assert link.connections.num_fronts == 0
    link.send(ViewQuery(ticket=8))
    link.connections.poll(20.0)
    assert link.next() == ViewAnswer(ticket=8, views=(VIEW,))
    link.close()


def test_an_answer_that_comes_later_from_another_thread_is_sent(tmp_path: Any) -> None:
    working = threading.Event()
    threads: list[threading.Thread] = []

    def execute(order: Command, answer: Callable[[CommandResult], None]) -> None:
        def work() -> None:
            assert working.wait(60)
            answer(CommandResult(ticket=order.ticket, payload=b"done"))

        threads.append(threading.Thread(target=work))
        threads[0].start()

    link = observed(tmp_path, execute)
    link.send(ObserverHello())
    link.next()
    link.send(ORDER)
    working.set()
    link.connections.poll(20.0)
    threads[0].join()
    link.connections.poll(0.0)
    assert link.next() == CommandResult(ticket=5, payload=b"done")
    threads[0].join()
    link.close()


def test_an_answer_for_a_disconnected_observer_is_dropped(tmp_path: Any) -> None:
    answers: list[Callable[[CommandResult], None]] = []
    link = observed(tmp_path, lambda order, answer: answers.append(answer))
    link.send(ObserverHello())
    link.send(ORDER)
    link.socket.close()
    link.connections.poll(20.0)
    link.connect()
    link.send(ObserverHello())
    assert isinstance(link.next(), EngineHello)
    answers[0](CommandResult(ticket=5))
    link.connections.poll(20.0)
    link.send(ViewQuery(ticket=8))
    link.connections.poll(20.0)
    assert link.next() == ViewAnswer(ticket=8, views=(VIEW,))
    link.close()


def test_an_observer_that_sends_a_frame_of_a_front_is_dropped(tmp_path: Any) -> None:
    link = observed(tmp_path, lambda order, answer: None)
    link.send(ObserverHello())
    link.next()
    link.send(FrontHello(front_id=1))
    assert link.socket.recv(1) == b""
    link.close()
