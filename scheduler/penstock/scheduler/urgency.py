"""Which prompts under way are late unless they have the whole budget of each step from now on.

Owns that judgement. Does not know who else is served, nor what follows from it.

Several long prompts that share each step are all late where one after the other some are in time.
"""

from collections.abc import Mapping

from penstock.scheduler.forecast import Ahead, Load, Machine, Want, forecast
from penstock.scheduler.slot_arrays import SlotArrays

_SPARE_STEPS = 2
"""Full steps that others may have before a prompt is in time no longer; less, and it is urgent."""


def urgent_of(
    due: Mapping[int, float], *, machine: Machine, load: Load, arrays: SlotArrays, now: float
) -> dict[int, float]:
    """Of `due`, slots and when their first tokens are due, those that are urgent."""
    num_spare = _SPARE_STEPS * load.prefill_budget_tokens
    urgent: dict[int, float] = {}
    for slot, due_s in due.items():
        num_done = int(arrays.num_computed[slot])
        num_left = int(arrays.num_tokens[slot]) - num_done
        want = Want(num_prefill_tokens=num_left + num_spare, num_cached_tokens=num_done)
        if now + forecast(machine, want, load, Ahead()).prefill_s > due_s:
            urgent[slot] = due_s
    return urgent
