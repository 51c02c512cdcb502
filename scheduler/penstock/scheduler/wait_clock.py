"""Queue time by reason.

Owns the account of every stay in the queue. Decides nothing: the planner reports after each step
what the next in line lacked, and that applies until the next step is planned.

**One clock.** It runs for all requests: four counters of seconds, one for each `WaitReason`. A
request remembers them when it starts to wait, and at the end the difference is its own. So a step
costs nothing per waiting request.

**Fairness.** When a request is admitted by its tenant's turn (not for age, and not past a request
that lacks blocks), then until the next admission FAIRNESS is the reason for requests of other
tenants in the same class that came before all of that tenant's waiting requests: in order of
arrival they would have been nearer. For the rest the reason of the step applies. What is added for
FAIRNESS is taken from that reason, so the parts still add up to the stay. With one tenant in a
class, and under FCFS, no request waits for FAIRNESS.

**Passed by.** `num_passed_by` counts how often, while a request waits, a later one is admitted.

Both need a sum over later arrivals, kept by place of arrival (later_sums.py): O(log n) for each
admission, n being the number of live requests, and nothing for one that was never overtaken.
"""

from bisect import bisect_left
from collections.abc import Iterable

from penstock.scheduler.events import Wait, WaitReason
from penstock.scheduler.later_sums import MIN_PLACES, LaterSums
from penstock.scheduler.request import Request

_FIELD_BITS = 64
_FIELD = (1 << _FIELD_BITS) - 1
_NS = 1_000_000_000


class WaitClock:
    """The account of the queue.

    Nanoseconds by reason are the fields of one integer, 64 bits each: adding, subtracting and
    remembering all of them is one operation. They only grow, so no field ever borrows.
    """

    def __init__(self) -> None:
        self.reason: WaitReason | None = None
        self._spent = 0
        self._since_s = 0.0
        self._num_places = MIN_PLACES
        self._next_place = 0
        self._passed = LaterSums(MIN_PLACES)
        # By class: what requests before a place waited for FAIRNESS instead.
        self._outrun: dict[int, LaterSums] = {}
        # The last request admitted by tenant: its class, its tenant, the place before which others
        # had come, and the counters when it was last recorded.
        self._turn: tuple[int, int, int, int] | None = None

    def tell(self, reason: WaitReason | None, now: float) -> None:
        """Record what the next request lacks from now on; None for nothing."""
        if reason is not self.reason:
            self._spent = self._spent_at(now)
            self._since_s = now
            self.reason = reason

    def seat(self, request: Request, live: Iterable[Request]) -> None:
        """Give a new request its place behind all earlier ones.

        `live`: all live requests, in order of arrival, this one last.
        """
        if self._next_place == self._num_places:
            self._move([one for one in live if one is not request])
        request.place = self._next_place
        self._next_place += 1

    def join(self, request: Request, now: float) -> None:
        """A request starts to wait."""
        spent = self._spent_at(now)
        if not request.num_preemptions:
            # Nothing is recorded above the last place.
            request.queue_mark = (now, spent, 0, 0)
            return
        # A returning request may have an earlier place than the current one.
        self._note_turn(spent)
        turn, priority = self._turn, request.spec.priority
        if turn is not None and turn[:2] == (priority, request.tenant):
            self._turn = (priority, request.tenant, min(turn[2], request.place), spent)
        passed = self._passed.later(request.place)
        request.queue_mark = (now, spent, passed, self._outrun_of(request))

    def admit(self, request: Request, eldest: Request | None, now: float) -> Wait:
        """A request is admitted; returns its stay in the queue, explained.

        `eldest`: of the requests waiting in its class for its tenant, itself included, the first to
        arrive; None when no other tenant waits there, or it was not admitted by tenant.
        """
        spent = self._spent_at(now)
        wait = self._end(request, spent, now)
        self._passed.note(request.place, 1)
        self._turn = None
        if eldest is not None:
            place = min(request.place, eldest.place)
            self._turn = (request.spec.priority, request.tenant, place, spent)
        return wait

    def leave(self, request: Request, now: float) -> Wait:
        """A request leaves the queue without admission; returns its stay, explained."""
        return self._end(request, self._spent_at(now), now)

    def _end(self, request: Request, spent: int, now: float) -> Wait:
        mark, request.queue_mark = request.queue_mark, None
        if mark is None:
            raise ValueError(f"request {request.spec.key} does not wait")
        since_s, spent_before, passed_before, outrun_before = mark
        if self._turn is not None:
            self._note_turn(spent)
        outrun = self._outrun_of(request) - outrun_before
        num_passed_by = self._passed.later(request.place) - passed_before
        if spent == spent_before:
            return Wait(0.0, 0.0, 0.0, 0.0, max(0.0, now - since_s), num_passed_by)
        # Of each reason, what is not FAIRNESS instead.
        own = spent - spent_before - outrun
        blocks_ns, slots_ns = own & _FIELD, own >> _FIELD_BITS & _FIELD
        budget_ns, fairness_ns = own >> 2 * _FIELD_BITS & _FIELD, own >> 3 * _FIELD_BITS
        while outrun:
            fairness_ns += outrun & _FIELD
            outrun >>= _FIELD_BITS
        known_ns = blocks_ns + slots_ns + budget_ns + fairness_ns
        return Wait(
            blocks_ns / _NS,
            slots_ns / _NS,
            budget_ns / _NS,
            fairness_ns / _NS,
            max(0.0, now - since_s - known_ns / _NS),
            num_passed_by,
        )

    def reason_of(self, request: Request) -> WaitReason | None:
        """The present reason of a waiting request."""
        turn = self._turn
        is_outrun = (
            turn is not None and turn[0] == request.spec.priority and request.place < turn[2]
        )
        return WaitReason.FAIRNESS if is_outrun and self.reason is not None else self.reason

    def _spent_at(self, now: float) -> int:
        if self.reason is None:
            return self._spent
        spent_ns = max(0, int((now - self._since_s) * _NS))
        return self._spent + (spent_ns << (self.reason - 1) * _FIELD_BITS)

    def _note_turn(self, spent: int) -> None:
        """Record the time since the last admission for those that it overtook."""
        if self._turn is None or self._turn[3] == spent:
            return
        priority, tenant, place, spent_before = self._turn
        sums = self._outrun.get(priority)
        if sums is None:
            sums = self._outrun[priority] = LaterSums(self._num_places)
        sums.note(place, spent - spent_before)
        self._turn = (priority, tenant, place, spent)

    def _outrun_of(self, request: Request) -> int:
        sums = self._outrun.get(request.spec.priority)
        return 0 if sums is None else sums.later(request.place)

    def _move(self, live: list[Request]) -> None:
        """All places are taken: compact the places of live requests."""
        places = [one.place for one in live]
        while self._num_places < 4 * len(live) + MIN_PLACES // 2:
            self._num_places *= 2
        self._passed = self._passed.moved(places, self._num_places)
        waiting = {one.spec.priority for one in live if one.queue_mark is not None}
        self._outrun = {
            priority: sums.moved(places, self._num_places)
            for priority, sums in self._outrun.items()
            if priority in waiting
        }
        if self._turn is not None:
            priority, tenant, place, spent = self._turn
            self._turn = (priority, tenant, bisect_left(places, place), spent)
        for place, one in enumerate(live):
            one.place = place
        self._next_place = len(live) + 1
