"""The simulated executor, with somebody looking on at what each step prefills, and no real tokens.

Owns the look at the batch. What the engine tells of a request does not include how much was
computed for it, and that is what is lost when it comes to nothing. Nobody reads what a simulated
request says and none has a stop id, so every token is 0: hashing them would be an eighth of a run.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.pace import Pacer
from penstock.scheduler.batch import Batch, StepResult

PrefillWatcher = Callable[[NDArray[np.int64], NDArray[np.int32]], None]
"""Is told keys [m], each once, and how many tokens of each a step prefills [m]."""


class WatchedExecutor(SimulatedExecutor):
    """Tells `on_prefill` of every step that prefills."""

    def __init__(self, config: ExecutorConfig, pacer: Pacer, on_prefill: PrefillWatcher) -> None:
        super().__init__(config, pacer=pacer)
        self._on_prefill = on_prefill
        self._zeros: NDArray[np.int32] = np.zeros(config.max_num_seqs, dtype=np.int32)

    def launch(self, batch: Batch) -> None:
        """See `SimulatedExecutor`."""
        super().launch(batch)
        if batch.num_rows > batch.num_decodes:
            slots = batch.slots[batch.num_decodes :]
            self._on_prefill(batch.arrays.key[slots], batch.num_tokens[batch.num_decodes :])

    def _plain_answer(self, batch: Batch) -> StepResult:
        slots = batch.sampled_slots
        return StepResult(slots=slots, tokens=self._zeros[: len(slots)])
