"""An executor that computes at once, behind a pipeline of two steps: what it reads lags by one.

The scheduler's arrays do not know the token of a step that was launched and not collected. A caller
that reads `num_tokens` for the place of the token to draw is then one behind; here that shows on
any machine, with an executor that has no separate pipeline.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace

import numpy as np

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.slot_arrays import SlotArrays


class LateArrays:
    """Passes batches on with the tokens that were drawn and not collected, and nothing else."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_lagging = 0
        """Rows that ran before their last token was collected."""
        self._results: deque[StepResult] = deque()
        self._drawn: dict[int, int] = {}

    @property
    def info(self) -> ExecutorInfo:
        return replace(self.inner.info, pipeline_depth=2)

    @property
    def ready_fd(self) -> int | None:
        return None

    def launch(self, batch: Batch) -> None:
        arrays = _copied(batch.arrays)
        last = batch.starts + batch.num_tokens - 1
        lagging = np.flatnonzero(last >= arrays.num_tokens[batch.slots])
        self.num_lagging += len(lagging)
        for row in lagging.tolist():
            slot = int(batch.slots[row])
            arrays.token_ids[slot, last[row]] = self._drawn[slot]
        self.inner.launch(replace(batch, arrays=arrays))
        result = self.inner.collect()
        self._drawn |= dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self.inner.close()


def _copied(arrays: SlotArrays) -> SlotArrays:
    copied = copy.copy(arrays)
    copied.token_ids = arrays.token_ids.copy()
    return copied
