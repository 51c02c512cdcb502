"""The loop of the engine process: its integrity checks, and its end after a failed check."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.scheduler.events import StepEvents
from penstock.scheduler.integrity import IntegrityError
from penstock.scheduler.request import NO_TIME
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.engine.loop import EngineLoop
from support.link import KEPT_LIMITS, FakeEngine, hello, listening
from support.timeout import TEST_TIMEOUT_S

NUM_PIECES = 5


class AuditedEngine(FakeEngine):
    """Records the number of steps at every completed integrity check."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.num_steps_wanted = 0
        self.done = threading.Event()
        self.num_steps_at_checks: queue.Queue[int] = queue.Queue()
        self.num_pieces = 0
        self.is_wrong = False

    def step(self) -> StepEvents:
        self.num_steps += 1
        if self.num_steps == self.num_steps_wanted:
            self.done.set()
        return super().step()

    def check_next_piece(self) -> bool:
        assert not self.has_work, "what is in flight need not balance"
        self.num_pieces += 1
        if self.num_pieces % NUM_PIECES:
            return False
        self.num_steps_at_checks.put(self.num_steps)
        if self.is_wrong:
            raise IntegrityError("a block is missing")
        return True


def with_loop(
    path: Path, engine: FakeEngine, test: Callable[[FrontConnections], None]
) -> list[str]:
    """Run `test` while the engine's loop runs on a thread; return the integrity errors that the
    loop raised.
    """
    raised: list[str] = []
    with listening(path) as listener:
        connections = FrontConnections(
            listener, Dispatcher(engine, hello(), kept_limits=KEPT_LIMITS)
        )
        loop = EngineLoop(connections, lambda: 0.0)

        def run() -> None:
            try:
                loop.run()
            except IntegrityError as error:
                raised.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            test(connections)
        finally:
            loop.stop()
            thread.join(TEST_TIMEOUT_S)
            assert not thread.is_alive()
            connections.close()
    return raised


def work_off(engine: AuditedEngine, connections: FrontConnections, num_steps: int) -> None:
    """Make the engine run `num_steps` steps, and wait for the last one."""
    engine.done.clear()
    engine.num_steps_wanted += num_steps
    for step in range(num_steps):
        nothing = np.zeros(0, dtype=np.int64)
        engine.updates.put(
            StepEvents(step=step, at_s=0.0, keys=nothing, tokens=nothing.astype(np.int32))
        )
    connections.wake()
    assert engine.done.wait(TEST_TIMEOUT_S)
    connections.wake()


def test_integrity_is_checked_whenever_the_engine_is_idle(path: Path) -> None:
    engine = AuditedEngine()

    def test(connections: FrontConnections) -> None:
        for num_steps in (3, 1, 200):
            work_off(engine, connections, num_steps)
            # If the loop is faster than the test, it also checks earlier.
            while engine.num_steps_at_checks.get(timeout=TEST_TIMEOUT_S) < engine.num_steps:
                pass

    assert with_loop(path, engine, test) == []


def test_a_failed_integrity_check_ends_the_loop(path: Path) -> None:
    engine = AuditedEngine()
    engine.is_wrong = True

    def test(connections: FrontConnections) -> None:
        work_off(engine, connections, 2)
        engine.num_steps_at_checks.get(timeout=TEST_TIMEOUT_S)

    assert with_loop(path, engine, test) == ["a block is missing"]


class EndlesslyCheckedEngine(AuditedEngine):
    """An engine whose integrity check never completes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: queue.Queue[int] = queue.Queue()

    def check_next_piece(self) -> bool:
        self.pieces.put(self.num_steps)
        return False


def test_new_work_runs_before_the_next_part_of_an_integrity_check(path: Path) -> None:
    engine = EndlesslyCheckedEngine()

    def test(connections: FrontConnections) -> None:
        for _ in range(3):
            work_off(engine, connections, 2)
            for _ in range(4):
                while engine.pieces.get(timeout=TEST_TIMEOUT_S) < engine.num_steps:
                    pass

    assert with_loop(path, engine, test) == []


class SelfPacedEngine(FakeEngine):
    """An engine that always has work. `ready_fd`: the read end of a pipe; the test writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.read_fd, self.notify_fd = os.pipe()
        self.steps: queue.Queue[bytes] = queue.Queue()
        self.wakeup_s = NO_TIME

    @property
    def has_work(self) -> bool:
        return True

    @property
    def ready_fd(self) -> int | None:
        return self.read_fd

    def next_wakeup_s(self) -> float:
        return self.wakeup_s

    def step(self) -> StepEvents:
        os.set_blocking(self.read_fd, False)
        try:
            reported = os.read(self.read_fd, 16)
        except BlockingIOError:
            reported = b""
        self.wakeup_s = NO_TIME
        self.steps.put(reported)
        return StepEvents(step=0, at_s=0.0)

    def next_notification(self) -> bytes:
        """Return what the next step read from the pipe; skip periodic steps that read
        nothing."""
        while not (reported := self.steps.get(timeout=TEST_TIMEOUT_S)):
            pass
        return reported


def test_a_self_paced_engine_steps_when_notified_or_due(path: Path) -> None:
    engine = SelfPacedEngine()

    def test(connections: FrontConnections) -> None:
        for reported in (b"a", b"b"):
            os.write(engine.notify_fd, reported)
            assert engine.next_notification() == reported
        # A front has sent something.
        connections.wake()
        assert engine.steps.get(timeout=TEST_TIMEOUT_S) == b""
        # A time limit has passed; and it also wakes from time to time without a reason.
        engine.wakeup_s = 0.0
        connections.wake()
        for _ in range(2):
            assert engine.steps.get(timeout=TEST_TIMEOUT_S) == b""
        # A loop that does not wait would be thousands of steps ahead by now.
        assert engine.steps.qsize() < 100

    assert with_loop(path, engine, test) == []
    os.close(engine.read_fd)
    os.close(engine.notify_fd)
