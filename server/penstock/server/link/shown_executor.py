"""An executor whose steps are on the engine's board before they begin.

Owns that order: whoever is in a step that kills the process was written down by then. Does not
know what the executor computes.
"""

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.server.link.board import EngineBoard


class ShownExecutor:
    """`penstock.scheduler.executor.Executor` in front of another."""

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
        # One that paces itself works on everybody it has, whoever is named in this step.
        self._board.step_begins(keys[keys != 0] if self._is_self_paced else keys[batch.slots])
        self._executor.launch(batch)

    def collect(self) -> StepResult:
        """See `Executor`."""
        return self._executor.collect()

    def close(self) -> None:
        """See `Executor`."""
        self._executor.close()
