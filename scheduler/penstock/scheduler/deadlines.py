"""The open deadlines of a request, and which prompts are late unless they get whole steps.

Owns which deadlines are open, whether a forecast meets them, and which prompts under way need the
whole budget of each step from now on: several long prompts that share each step are all late where
one after the other some are in time. Does not forecast.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.scheduler.forecast import (
    Demand,
    Forecast,
    Load,
    Machine,
    QueuedAhead,
    can_meet,
    forecast,
)
from penstock.scheduler.request import NO_TIME, FailureReason, Request
from penstock.scheduler.slot_arrays import SlotArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """For the first token, until it is sent, and for the whole answer; engine clock."""

    ttft_s: float
    total_s: float

    @property
    def earliest_s(self) -> float:
        """The earliest one."""
        return min(self.ttft_s, self.total_s)

    @property
    def is_any(self) -> bool:
        """Whether there is a deadline at all."""
        return self.earliest_s != NO_TIME

    def are_met(self, forecast: Forecast, now: float) -> bool:
        """Whether a forecast made now meets them."""
        return can_meet(forecast, now, ttft_deadline_s=self.ttft_s, deadline_s=self.total_s)

    def passed_by(self, now: float) -> FailureReason:
        """The deadline that has passed."""
        if self.total_s <= now:
            return FailureReason.DEADLINE_EXCEEDED
        return FailureReason.TTFT_DEADLINE_EXCEEDED


def deadlines_of(request: Request) -> Deadlines:
    """Of a request; a first token that was sent before a preemption has met its deadline."""
    spec = request.spec
    is_first_due = request.first_token_s == NO_TIME
    return Deadlines(
        ttft_s=spec.ttft_deadline_s if is_first_due else NO_TIME, total_s=spec.deadline_s
    )


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
        demand = Demand(num_prefill_tokens=num_left + num_spare, num_cached_tokens=num_done)
        if now + forecast(machine, demand, load, QueuedAhead()).prefill_s > due_s:
            urgent[slot] = due_s
    return urgent
