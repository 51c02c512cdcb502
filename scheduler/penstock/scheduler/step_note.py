"""What one step was, told to whoever keeps a record of steps.

Owns one value. Does not know who keeps it; making it must cost next to nothing, hence a named
tuple: a tenth of what a frozen dataclass of as many fields takes.
"""

from typing import NamedTuple

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import WaitReason


class StepNote(NamedTuple):
    """A step with rows whose result is in. Times are seconds on the engine's clock.

    `begun_s`: planning began; `launched_s`: it was over, and the executor was given the step;
    `collected_s`: its result was there; `updated_s`: and was taken in. So what an executor computes
    before `launch` returns is its own time. `num_prefill_tokens` and `num_context_tokens` as in
    `CostModel`. `predicted_s`: how long the step was expected to take, NaN when nothing is known.
    `waits_for`: what kept the next in line out when it was planned, None when nobody waited or
    everybody was let in. The counts after it are of the moment when the result was taken in.
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
