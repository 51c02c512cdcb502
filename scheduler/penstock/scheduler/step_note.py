"""What one step was, told to whoever keeps a record of steps.

Owns one value. Does not know who keeps it; making it must cost next to nothing.
"""

from dataclasses import dataclass

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import WaitReason


@dataclass(frozen=True, slots=True, eq=False)
class StepNote:
    """A step whose result is in. Times are seconds on the engine's clock.

    `begun_s`: planning began; `launched_s`: the executor had it; `collected_s`: its result was
    there; `updated_s`: and was taken in. `predicted_s`: how long it was expected to take, NaN when
    nothing is known. `waits_for`: what kept the next in line out when it was planned, None when
    nobody waited or everybody was let in.
    """

    batch: Batch
    begun_s: float
    launched_s: float
    collected_s: float
    updated_s: float
    predicted_s: float
    waits_for: WaitReason | None
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
