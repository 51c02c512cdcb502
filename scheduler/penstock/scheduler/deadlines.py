"""The deadlines of a request that are still open.

Owns which deadlines are open and whether a forecast meets them. Does not forecast.
"""

from dataclasses import dataclass

from penstock.scheduler.forecast import Forecast, can_meet
from penstock.scheduler.request import NO_TIME, FailureReason, Request


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
    """The open deadlines; a first token sent before a preemption has met its deadline."""
    spec = request.spec
    is_first_due = request.first_token_s == NO_TIME
    return Deadlines(
        ttft_s=spec.ttft_deadline_s if is_first_due else NO_TIME, total_s=spec.deadline_s
    )
