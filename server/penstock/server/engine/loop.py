"""The engine process's loop: receive frames, step, send frames.

Owns when to step, when to wait, when to run the integrity check and when chores are due. With an
ordinary executor the engine steps while it has work. With a self-paced executor it steps when the
executor has results, when a front sent a frame and when a request's time limit passes. The
integrity check runs while the engine is idle, one piece at a time, so that a new request waits for
at most one piece.

Also owns when each entry of the status board is written. Requests are written before their step
starts, so that the board names them if the step kills the process.
"""

from collections.abc import Callable

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.link.board import EngineBoard

_MAX_WAIT_S = 0.5
"""The longest wait: the heartbeat must continue, and a self-paced executor that has work but
reports nothing may be dead.
"""
_CHORES_EVERY_S = 1.0
_QUIET_S = 0.05
"""Idle time before the integrity check, so that it does not run between requests."""


class StatusPublisher:
    """Publishes the status of the dispatcher's engine on `board`, on the loop's thread."""

    def __init__(self, board: EngineBoard, dispatcher: Dispatcher) -> None:
        self._board = board
        self._dispatcher = dispatcher

    def heartbeat(self) -> None:
        """Publish that the loop is running."""
        self._board.beat()

    def after_step(self) -> None:
        """Publish the queue, the load and the retention cuts."""
        board, dispatcher = self._board, self._dispatcher
        engine = dispatcher.engine
        num_waiting, num_tokens = engine.queue_size
        queue_s = dispatcher.newest_queue_s if num_waiting else None
        board.show_queue(num_waiting, num_tokens, queue_s)
        board.show_load(*engine.occupancy, dispatcher.num_output_tokens)
        board.show_retention_cuts(*engine.retention_cuts)

    def idle(self) -> None:
        """Clear the board's steps: all work is done and the integrity check has passed."""
        self._board.no_step()


class StatusBoardExecutor:
    """Wraps another `Executor`, and publishes each step's keys on `board` before its launch."""

    def __init__(self, executor: Executor, board: EngineBoard) -> None:
        self._executor = executor
        self._board = board
        self._is_self_paced = executor.info.is_self_paced

    @property
    def info(self) -> ExecutorInfo:
        """See `Executor`."""
        return self._executor.info

    @property
    def ready_fd(self) -> int | None:
        """See `Executor`."""
        return self._executor.ready_fd

    def launch(self, batch: Batch) -> None:
        """See `Executor`."""
        keys = batch.arrays.key
        # A self-paced executor works on all its requests, not only on those of this step.
        self._board.step_begins(keys[keys != 0] if self._is_self_paced else keys[batch.slots])
        self._executor.launch(batch)

    def collect(self) -> StepResult:
        """See `Executor`."""
        return self._executor.collect()

    def close(self) -> None:
        """See `Executor`."""
        self._executor.close()


class EngineLoop:
    """Runs one engine for the fronts of one hub, on the calling thread.

    `clock` is the engine's. `display` publishes the engine's status, None for none. `stop()` may be
    called from a signal handler or another thread.
    """

    def __init__(
        self,
        hub: FrontConnections,
        clock: Callable[[], float],
        display: StatusPublisher | None = None,
    ) -> None:
        self._dispatcher = dispatcher = hub.dispatcher
        self._hub = hub
        self._clock = clock
        self._display = display
        self._chores: list[Callable[[], object]] = []
        self._chores_due_s = clock() + _CHORES_EVERY_S
        self._is_stopping = False
        self._is_self_paced = dispatcher.engine.ready_fd is not None
        if dispatcher.engine.ready_fd is not None:
            hub.watch(dispatcher.engine.ready_fd)

    def add_chore(self, chore: Callable[[], object]) -> None:
        """Run `chore` between two steps, about once a second, also without work.

        It must be quick: every stream waits for it. An exception that it raises ends the engine.
        """
        self._chores.append(chore)

    def stop(self) -> None:
        """Make `run` return before the next step."""
        self._is_stopping = True
        self._hub.wake()

    def run(self) -> None:
        """Serve until `stop`. Propagates an exception of the engine, which has then failed."""
        dispatcher, display = self._dispatcher, self._display
        engine = dispatcher.engine
        # The integrity check since the last step: not started; partly done.
        was_busy = is_checking = False
        while not self._is_stopping:
            if display is not None:
                display.heartbeat()
            has_frames = self._hub.poll(0.0 if is_checking else self._wait_s(was_busy=was_busy))
            now_s = self._clock()
            if now_s >= self._chores_due_s:
                self._do_chores(now_s)
            is_due = has_frames or engine.has_work or dispatcher.has_own_work
            if is_due or now_s >= engine.next_wakeup_s():
                for front_id, frame in dispatcher.step():
                    self._hub.send(front_id, frame)
                if display is not None:
                    display.after_step()
                was_busy, is_checking = True, False
            elif was_busy or is_checking:
                # The accounts must balance exactly when no step is in flight.
                was_busy, is_checking = False, not engine.check_next_piece()
                if display is not None and not is_checking:
                    display.idle()

    def _do_chores(self, now_s: float) -> None:
        self._chores_due_s = now_s + _CHORES_EVERY_S
        for chore in self._chores:
            chore()

    def _wait_s(self, *, was_busy: bool) -> float:
        engine = self._dispatcher.engine
        if self._is_stopping or self._dispatcher.has_own_work:
            return 0.0
        if not engine.has_work:
            most_s = _QUIET_S if was_busy else _MAX_WAIT_S
        elif self._is_self_paced:
            most_s = _MAX_WAIT_S
        else:
            return 0.0
        return min(most_s, max(0.0, engine.next_wakeup_s() - self._clock()))
