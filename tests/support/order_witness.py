"""Watches who is let in and who is passed, in place of an engine's order.

Owns the count of what each blocked head suffered, kept apart from the engine's own. Does not
choose: the order that it stands in front of does.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.queue_order import QueueOrder
from penstock.scheduler.request import Request

MAX_PASSED_OF_ONE_LINE = 4


@dataclass(slots=True)
class _Wait:
    """Since when a head that lacked blocks stood there, and how many passed it."""

    since_s: float
    num_overtaken: int = 0


class OrderWitness:
    """An `QueueOrder` that checks what batch_admission.py promises of the one behind it.

    In a round, from the first that lacks blocks (the head) to its end: at most `max_lookahead`
    are passed over, four of a line; whom a preemption threw out is not passed; and over all rounds
    at most `max_num_overtakes` pass one head, none later than `max_overtake_s` after it first was
    found blocked.
    """

    def __init__(self, order: QueueOrder, config: SchedulerConfig) -> None:
        self._order = order
        self._config = config
        self._now = 0.0
        self._passed: list[Request] = []
        self._waits: dict[int, _Wait] = {}
        self.num_passes = 0

    def __len__(self) -> int:
        return len(self._order)

    def push(self, request: Request) -> None:
        self._order.push(request)

    def discard(self, request: Request) -> None:
        self._waits.pop(request.ticket, None)
        self._order.discard(request)

    def release(self, tenant: int) -> None:
        self._order.release(tenant)

    def peek_in_turn(self, now: float) -> Request | None:
        return self._order.peek_in_turn(now)

    def eldest_beside(self, request: Request) -> Request | None:
        return self._order.eldest_beside(request)

    def first(self, max_num: int) -> list[Request]:
        return self._order.first(max_num)

    def peek(self, now: float) -> Request | None:
        """Who goes next; the time is that of the round."""
        self._now = now
        return self._order.peek(now)

    def pass_over(self, request: Request) -> None:
        """A client does not fit, and those behind are tried."""
        assert self._config.max_lookahead
        assert not request.num_preemptions, "whom a preemption threw out is not passed"
        self._passed.append(request)
        assert len(self._passed) <= self._config.max_lookahead
        line = [(one.spec.priority, one.tenant) for one in self._passed]
        assert line.count(line[-1]) <= MAX_PASSED_OF_ONE_LINE
        if len(self._passed) == 1:
            self._waits.setdefault(request.ticket, _Wait(self._now))
        self._order.pass_over(request)

    def note_admission(self, request: Request) -> bool:
        """A client is let in, past the head of this round if there is one; whether by age."""
        self._waits.pop(request.ticket, None)
        if self._passed:
            wait = self._waits[self._passed[0].ticket]
            wait.num_overtaken += 1
            self.num_passes += 1
            assert wait.num_overtaken <= self._config.max_num_overtakes
            assert self._now - wait.since_s <= self._config.max_overtake_s
        return self._order.note_admission(request)

    def end_round(self) -> None:
        """The round is over."""
        self._passed.clear()
        self._order.end_round()
