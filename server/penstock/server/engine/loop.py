"""The main loop of the engine process: receives frames, runs steps and sends frames.

Decides when to run a step, when to wait, and when to run the engine's integrity check and periodic
tasks. With an ordinary executor the engine runs steps while it has work. A self-paced executor
schedules its own batches. With such an executor the engine runs a step when the executor has
results, when a front (gRPC server process) has sent a frame, and when the time limit of a request
expires. The integrity check runs in small parts while the engine is idle, so that a new request
waits for at most one part.

The loop also writes the status board, a shared memory that the other processes read. It writes the
requests of a step before the step starts, so that the board lists them if the step crashes the
process.
"""

from collections.abc import Callable

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.ipc.board import EngineBoard

_MAX_WAIT_S = 0.5
"""Maximum wait, in seconds. A longer wait would delay the heartbeat, and the detection of a
self-paced executor that has work but returns no results."""
_TASKS_EVERY_S = 1.0
_QUIET_S = 0.05
"""Idle time before the integrity check starts, in seconds, so that it does not run between two
requests."""


class StatusPublisher:
    """Publishes the status of the dispatcher's engine on `board`, on the main loop's thread."""

    def __init__(self, board: EngineBoard, dispatcher: Dispatcher) -> None:
        self._board = board
        self._dispatcher = dispatcher

    def heartbeat(self) -> None:
        """Publish that the main loop is running."""
        self._board.heartbeat()

    def after_step(self) -> None:
        """Publish the state of the queue, the load, and the counts of `RetentionCuts`."""
        board, dispatcher = self._board, self._dispatcher
        engine = dispatcher.engine
        num_waiting, num_tokens = engine.queue_size
        queue_s = dispatcher.newest_queue_s if num_waiting else None
        board.publish_queue(num_waiting, num_tokens, queue_s)
        board.publish_load(*engine.occupancy, dispatcher.num_output_tokens)
        board.publish_retention_cuts(*engine.retention_cuts)

    def idle(self) -> None:
        """Remove the last steps from the board. Called when all work is done and the integrity
        check has passed."""
        self._board.clear_step()


class StatusBoardExecutor:
    """Wraps an `Executor` and publishes the keys of the outputs in each step on `board` before the
    launch."""

    def __init__(self, executor: Executor, board: EngineBoard) -> None:
        self._executor = executor
        self._board = board
        self._is_self_paced = executor.info.is_self_paced

    @property
    def info(self) -> ExecutorInfo:
        """The limits and features of the wrapped executor."""
        return self._executor.info

    @property
    def ready_fd(self) -> int | None:
        """A descriptor that becomes readable when a self-paced executor has results; None for other
        executors."""
        return self._executor.ready_fd

    def launch(self, batch: Batch) -> None:
        """Publish the keys of the outputs in the step, then launch it."""
        keys = batch.arrays.key
        # A self-paced executor works on all its requests, not only on those of this step.
        self._board.mark_step(keys[keys != 0] if self._is_self_paced else keys[batch.slots])
        self._executor.launch(batch)

    def collect(self) -> StepResult:
        """Return the result of the oldest launched step; see `Executor.collect`."""
        return self._executor.collect()

    def close(self) -> None:
        """Close the wrapped executor. Idempotent."""
        self._executor.close()


class EngineLoop:
    """Runs one engine for the fronts of `connections`, on the calling thread.

    `clock` is the engine's clock. `publisher` publishes the status of the engine; None disables it.
    `stop()` may be called from a signal handler or from another thread.
    """

    def __init__(
        self,
        connections: FrontConnections,
        clock: Callable[[], float],
        publisher: StatusPublisher | None = None,
    ) -> None:
        self._dispatcher = dispatcher = connections.dispatcher
        self._connections = connections
        self._clock = clock
        self._publisher = publisher
        self._tasks: list[Callable[[], object]] = []
        self._tasks_due_s = clock() + _TASKS_EVERY_S
        self._is_stopping = False
        self._is_self_paced = dispatcher.engine.ready_fd is not None
        if dispatcher.engine.ready_fd is not None:
            connections.watch(dispatcher.engine.ready_fd)

    def add_task(self, task: Callable[[], object]) -> None:
        """Call `task` between two steps about once per second, even without work.

        It must be quick, because all streams wait for it. An exception from it stops the engine.
        """
        self._tasks.append(task)

    def stop(self) -> None:
        """Make `run` return at the end of its current iteration, which may still run one step."""
        self._is_stopping = True
        self._connections.wake()

    def run(self) -> None:
        """Serve until `stop` is called. An exception of the engine propagates; the engine has then
        failed."""
        dispatcher, publisher = self._dispatcher, self._publisher
        engine = dispatcher.engine
        # Whether a step has run since the last integrity check began, and whether that check is
        # incomplete.
        was_busy = is_checking = False
        while not self._is_stopping:
            if publisher is not None:
                publisher.heartbeat()
            has_frames = self._connections.poll(
                0.0 if is_checking else self._wait_s(was_busy=was_busy)
            )
            now_s = self._clock()
            if now_s >= self._tasks_due_s:
                self._run_tasks(now_s)
            is_due = has_frames or engine.has_work or dispatcher.has_pending_work
            if is_due or now_s >= engine.next_wakeup_s():
                for front_id, frame in dispatcher.step():
                    self._connections.send(front_id, frame)
                if publisher is not None:
                    publisher.after_step()
                was_busy, is_checking = True, False
            elif was_busy or is_checking:
                # The counts of blocks are consistent only while no step is in flight.
                was_busy, is_checking = False, not engine.check_next_piece()
                if publisher is not None and not is_checking:
                    publisher.idle()

    def _run_tasks(self, now_s: float) -> None:
        self._tasks_due_s = now_s + _TASKS_EVERY_S
        for task in self._tasks:
            task()

    def _wait_s(self, *, was_busy: bool) -> float:
        engine = self._dispatcher.engine
        if self._is_stopping or self._dispatcher.has_pending_work:
            return 0.0
        if not engine.has_work:
            most_s = _QUIET_S if was_busy else _MAX_WAIT_S
        elif self._is_self_paced:
            most_s = _MAX_WAIT_S
        else:
            return 0.0
        return min(most_s, max(0.0, engine.next_wakeup_s() - self._clock()))
