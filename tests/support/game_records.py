"""What a game against the engine writes down: batches, and what each client was told."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.batch import Batch
from penstock.scheduler.events import Failed, Finished
from penstock.scheduler.request import FinishReason, RequestSpec


class BudgetedExecutor(SimulatedExecutor):
    """A strict device that also holds the scheduler to its token budget."""

    max_num_batched_tokens = 0
    log: list[tuple[tuple[int, int, int], ...]]

    def launch(self, batch: Batch) -> None:
        assert batch.num_rows or batch.released
        assert int(batch.num_tokens.sum()) <= self.max_num_batched_tokens
        assert (batch.num_tokens > 0).all()
        rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.num_tokens, strict=True)
        self.log.append(tuple((slot, start, int(count)) for slot, start, count in rows))
        super().launch(batch)


@dataclass(slots=True)
class Told:
    """What a client was told about one output."""

    spec: RequestSpec
    reference: NDArray[np.int32]
    sequence: int
    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None
    is_running: bool = False
    num_admissions: int = 0
    cancelled_as: FinishReason | None = None

    level: int = 0
    num_preemptions: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is more senior under FCFS."""
        return (-self.spec.priority, self.sequence)
