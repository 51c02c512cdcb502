"""What an engine writes to its status board: heartbeat, queue, load, and the requests of each step.

Owns when each entry is written. Requests are written before their step starts, so that the board
names them if the step kills the process.
"""

from collections.abc import Callable

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.server.link.board import EngineBoard
from penstock.server.link.dispatch import Dispatcher


class StatusPublisher:
    """Publishes the status of `dispatcher`'s engine on `board`, on the thread of the engine's loop.

    `queue_size`: how many requests wait, and the tokens they would prefill. `occupancy`: how many
    run, and the blocks they use; `retention_cuts`: what the retention budget has cut; None where
    that is not published.
    """

    def __init__(
        self,
        board: EngineBoard,
        dispatcher: Dispatcher,
        queue_size: Callable[[], tuple[int, int]],
        occupancy: Callable[[], tuple[int, int]] | None = None,
        retention_cuts: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._board = board
        self._dispatcher = dispatcher
        self._queue_size = queue_size
        self._occupancy = occupancy
        self._retention_cuts = retention_cuts

    def heartbeat(self) -> None:
        """The loop is running."""
        self._board.beat()

    def after_step(self) -> None:
        """A step has ended."""
        num_waiting, num_tokens = self._queue_size()
        queue_s = self._dispatcher.newest_queue_s if num_waiting else None
        self._board.show_queue(num_waiting, num_tokens, queue_s)
        if self._occupancy is not None:
            num_running, num_blocks = self._occupancy()
            self._board.show_load(num_running, num_blocks, self._dispatcher.num_output_tokens)
        if self._retention_cuts is not None:
            self._board.show_retention_cuts(*self._retention_cuts())

    def idle(self) -> None:
        """All work is done, and the integrity check has passed."""
        self._board.no_step()


class StatusBoardExecutor:
    """A `penstock.scheduler.executor.Executor` that wraps another."""

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
