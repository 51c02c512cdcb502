"""Heartbeats of the engine loop, its periodic work, and the status board of a real engine."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.engine.loop import EngineLoop, StatusBoardExecutor, StatusPublisher
from penstock.server.engine.quarantine import Quarantine, SuspectedRequest
from penstock.server.ipc.board import BoardView, EngineBoard, create_board
from penstock.server.ipc.frames import Frame, Submit, cancel_frame, decode
from penstock.server.ipc.wire import FrameBuffer
from support.link import KEPT_LIMITS, FakeEngine, hello, listening, spec
from support.timeout import TEST_TIMEOUT_S


@pytest.fixture
def board_fd() -> Iterator[int]:
    fd = create_board(16)
    yield fd
    os.close(fd)


def read(frame: bytes) -> Frame:
    (body,) = FrameBuffer().feed(frame)
    return decode(body)


class RecordingPublisher(StatusPublisher):
    """Records every heartbeat of the loop in `rounds`."""

    def __init__(self, board: EngineBoard, dispatcher: Dispatcher) -> None:
        super().__init__(board, dispatcher)
        self.rounds: queue.Queue[None] = queue.Queue()

    def heartbeat(self) -> None:
        super().heartbeat()
        self.rounds.put(None)


def test_an_idle_loop_sends_heartbeats_and_runs_its_periodic_tasks(
    path: Path, board_fd: int
) -> None:
    dispatcher = Dispatcher(FakeEngine(), hello(), kept_limits=KEPT_LIMITS)
    board, view = EngineBoard(board_fd, 3), BoardView(board_fd)
    done: queue.Queue[str] = queue.Queue()
    with listening(path) as listener:
        connections = FrontConnections(listener, dispatcher)
        publisher = RecordingPublisher(board, dispatcher)
        loop = EngineLoop(connections, time.monotonic, publisher)
        loop.add_task(lambda: done.put("one"))
        loop.add_task(lambda: done.put("two"))
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            # The periodic work also runs without a front and without requests.
            assert [done.get(timeout=TEST_TIMEOUT_S) for _ in range(4)] == ["one", "two"] * 2
            for _ in range(3):
                publisher.rounds.get(timeout=TEST_TIMEOUT_S)
        finally:
            loop.stop()
            thread.join(TEST_TIMEOUT_S)
            connections.close()
    assert not thread.is_alive()
    assert view.num_heartbeats >= 3
    assert view.epoch == 3
    board.close()
    view.close()


class Bench:
    """A real engine with the simulated executor and a status board, stepped by the test."""

    def __init__(self, fd: int, *suspects: SuspectedRequest, max_num_seqs: int = 2) -> None:
        executor = create_executor(
            ExecutorConfig(
                kind=ExecutorKind.SIMULATED,
                num_blocks=64,
                max_num_seqs=max_num_seqs,
                pipeline_depth=1,
            )
        )
        self.board, self.view = EngineBoard(fd, 1), BoardView(fd)
        shown = StatusBoardExecutor(executor, self.board)
        self.engine = Engine(shown, SchedulerConfig(), time.monotonic)
        self.dispatcher = Dispatcher(
            self.engine,
            hello(),
            kept_limits=KEPT_LIMITS,
            quarantine=Quarantine(suspects, self.board.mark_probation),
            mark_submitting=self.board.mark_submitting,
        )
        self.publisher = StatusPublisher(self.board, self.dispatcher)
        self.dispatcher.front_connected(1)
        self.ends: dict[int, Completed | Failed] = {}
        self.tokens: dict[int, int] = {}

    def submit(self, *counters: int, num_replays: int = 0) -> None:
        for counter in counters:
            one = replace(spec(1, counter, max_tokens=6), num_replays=num_replays)
            self.dispatcher.handle_frame(1, Submit(specs=(one,)))

    def step(self) -> None:
        for _, frame in self.dispatcher.step():
            events = read(frame)
            for key in events.keys.tolist():  # type: ignore[union-attr]  # only steps are sent
                self.tokens[key] = self.tokens.get(key, 0) + 1
            self.ends.update({end.key: end for end in events.ends})  # type: ignore[union-attr]
        self.publisher.after_step()

    def run(self) -> None:
        for _ in range(200):
            if not (self.engine.has_work or self.dispatcher.has_pending_work):
                return
            self.step()
        raise AssertionError("it does not end")

    def close(self) -> None:
        self.board.close()
        self.view.close()


def key(counter: int) -> int:
    return 1 << 32 | counter


def test_the_board_shows_the_requests_of_the_step_and_how_many_wait(board_fd: int) -> None:
    bench = Bench(board_fd)
    bench.submit(1, 2, 3)
    bench.step()
    assert bench.view.keys_in_progress() == {key(1), key(2)}
    queue_state = bench.view.queue
    assert (queue_state.num_waiting, queue_state.num_waiting_tokens) == (1, 6)
    bench.run()
    bench.publisher.idle()
    assert bench.view.keys_in_progress() == frozenset()
    assert bench.view.queue.num_waiting == 0
    assert set(bench.ends) == {key(1), key(2), key(3)}
    bench.close()


def test_the_board_shows_how_busy_the_engine_is(board_fd: int) -> None:
    bench = Bench(board_fd)
    bench.submit(1, 2, 3)
    bench.step()
    load = bench.view.load
    assert (load.num_running, load.num_waiting) == (2, 1)
    assert load.num_used_blocks == bench.engine.occupancy[1] > 0
    bench.run()
    load = bench.view.load
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
    assert load.num_output_tokens == sum(bench.tokens.values()) == 18
    bench.close()


def test_suspected_requests_run_one_by_one_and_the_others_at_once(board_fd: int) -> None:
    suspects = [SuspectedRequest(key=key(number), num_probation_tokens=2) for number in (1, 2)]
    bench = Bench(board_fd, *suspects, max_num_seqs=8)
    bench.submit(1, 2, 3, num_replays=1)
    bench.submit(4)
    bench.step()
    assert bench.view.keys_on_probation() == {key(1)}
    assert bench.view.keys_in_progress() == {key(1), key(3), key(4)}
    while key(2) not in bench.view.keys_in_progress():
        assert bench.tokens.get(key(2), 0) == 0
        bench.step()
    assert bench.tokens[key(1)] >= 2
    bench.run()
    assert bench.view.keys_on_probation() == frozenset()
    assert set(bench.ends) == {key(number) for number in (1, 2, 3, 4)}
    assert bench.dispatcher.num_live == 0
    bench.engine.check_integrity()
    bench.close()


def test_a_quarantined_request_is_rejected_without_reaching_the_engine(board_fd: int) -> None:
    bench = Bench(board_fd, SuspectedRequest(key=key(1), is_poison=True))
    bench.submit(1, num_replays=1)
    assert not bench.engine.has_work
    bench.run()
    end = bench.ends[key(1)]
    assert isinstance(end, Failed)
    assert end.reason is FailureReason.EXECUTOR_REQUEST_FAILED
    assert bench.tokens == {}
    assert bench.dispatcher.num_live == 0
    bench.close()


def test_a_request_waiting_for_probation_can_be_cancelled(board_fd: int) -> None:
    bench = Bench(board_fd, *[SuspectedRequest(key=key(number)) for number in (1, 2)])
    bench.submit(1, 2, num_replays=1)
    bench.step()
    cancel = cancel_frame((key(2),), FinishReason.CANCELLED)
    bench.dispatcher.handle_frame(1, read(cancel))
    bench.run()
    end = bench.ends[key(2)]
    assert isinstance(end, Completed)
    assert end.reason is FinishReason.CANCELLED
    assert bench.tokens.keys() == {key(1)}
    bench.close()
