"""A step's summary for recorders.

Owns one value, a named tuple: it takes a tenth of the time of a frozen dataclass with as many
fields.
"""

from typing import NamedTuple

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import WaitReason


class StepNote(NamedTuple):
    """A step with rows whose result is in. Times are seconds on the engine's clock.

    `begun_s`: planning began; `launched_s`: planning ended, and the executor got the step;
    `collected_s`: its result had arrived; `updated_s`: and was applied. So what an executor
    computes before `launch` returns is its own time. `num_prefill_tokens` and `num_context_tokens`
    as in `CostModel`. `predicted_s`: the predicted duration of the step, NaN without a prediction.
    `waits_for`: what the next in line lacked when it was planned, None when none waited or all were
    admitted. The counts after it are of the moment when the result was applied.
    """

    batch: Batch
    begun_s: float
    launched_s: float
    num_prefill_tokens: int
    num_context_tokens: int
    predicted_s: float
    waits_for: WaitReason | None
    collected_s: float
    updated_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
