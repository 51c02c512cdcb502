"""Queue time by reason.

Owns the account of every stay in the queue. Decides nothing: the planner reports after each step
what the next in line lacked, and that applies until the next step is planned.

**One clock.** Four counters run for all requests, one for each `WaitReason`. A request remembers
them when it starts to wait, and at the end the difference is its own. So a step costs nothing per
waiting request.

**Fairness.** When a request is admitted by its tenant's turn (not for age, and not past a request
that lacks blocks), then until the next admission FAIRNESS is the reason for requests of other
tenants in the same class that came before all of that tenant's waiting requests: in order of
arrival they would have been nearer. For the rest the reason of the step applies. What is added for
FAIRNESS is taken from that reason, so the parts still add up to the stay. With one tenant in a
class, and under FCFS, no request waits for FAIRNESS.

**Passed by.** `num_passed_by` counts how often, while a request waits, a later one is admitted.

Both are columns over the waiting requests: an admission is a few operations over whole columns.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import Wait, WaitReason
from penstock.scheduler.request import Request

_NS = 1_000_000_000
FIRST_CAPACITY = 256


class WaitClock:
    """The account of the queue; `reason`: what its first request lacks, None: nothing."""

    def __init__(self) -> None:
        self.reason: WaitReason | None = None
        # Nanoseconds by reason, as of `_since_ns`.
        self._spent_ns = [0, 0, 0, 0]
        self._since_ns = 0
        # The last request admitted by tenant: its class, its tenant, and the sequence number before
        # which others had come.
        self._turn: tuple[int, int, int] | None = None
        # By place, of waiting requests; free places have any values.
        self._sequence: NDArray[np.int64] = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._level: NDArray[np.int64] = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        # Rows: by reason the nanoseconds that count for FAIRNESS instead; admissions that passed.
        self._counts: NDArray[np.int64] = np.zeros((5, FIRST_CAPACITY), dtype=np.int64)
        self._free: list[int] = []
        self._num_places = 0

    def note_reason(self, reason: WaitReason | None, now: float) -> None:
        """Record what the next request lacks from now on; None for nothing."""
        if reason is not self.reason:
            self._advance(now)
            self.reason = reason

    def join(self, request: Request, now: float) -> None:
        """A request starts to wait."""
        self._advance(now)
        turn, priority = self._turn, request.spec.priority
        if turn is not None and turn[:2] == (priority, request.tenant):
            # After a preemption it may have arrived before the others of its tenant.
            self._turn = (priority, request.tenant, min(turn[2], request.sequence))
        request.place = place = self._free.pop() if self._free else self._new_place()
        self._sequence[place] = request.sequence
        self._level[place] = priority
        self._counts[:, place] = 0
        request.queue_mark = (now, tuple(self._spent_ns))

    def admit(self, request: Request, eldest: Request | None, now: float) -> Wait:
        """A request is admitted; returns its wait by reason.

        `eldest`: of the requests waiting in its class for its tenant, itself included, the first to
        arrive; None when no other tenant waits there, or it was not admitted by tenant.
        """
        wait = self.leave(request, now)
        self._note_passed(request)
        self._turn = None
        if eldest is not None:
            first = min(request.sequence, eldest.sequence)
            self._turn = (request.spec.priority, request.tenant, first)
        return wait

    def leave(self, request: Request, now: float) -> Wait:
        """A request leaves the queue; returns its wait by reason."""
        mark, request.queue_mark = request.queue_mark, None
        if mark is None:
            raise ValueError(f"request {request.spec.key} does not wait")
        self._advance(now)
        since_s, (blocks_ns, slots_ns, budget_ns, fairness_ns) = mark
        self._free.append(request.place)
        # Of each reason, what counts for FAIRNESS instead.
        blocks, slots, budget, _, num_passed_by = self._counts[:, request.place].tolist()
        spent = self._spent_ns
        blocks_ns = spent[0] - blocks_ns - blocks
        slots_ns = spent[1] - slots_ns - slots
        budget_ns = spent[2] - budget_ns - budget
        fairness_ns = spent[3] - fairness_ns + blocks + slots + budget
        known_s = (blocks_ns + slots_ns + budget_ns + fairness_ns) / _NS
        return Wait(
            blocks_ns / _NS,
            slots_ns / _NS,
            budget_ns / _NS,
            fairness_ns / _NS,
            max(0.0, now - since_s - known_s),
            num_passed_by,
        )

    def reason_of(self, request: Request) -> WaitReason | None:
        """The present reason of a waiting request."""
        turn = self._turn
        is_outrun = (
            turn is not None and turn[0] == request.spec.priority and request.sequence < turn[2]
        )
        return WaitReason.FAIRNESS if is_outrun and self.reason is not None else self.reason

    def _note_passed(self, request: Request) -> None:
        """Record that this request passed earlier ones."""
        places = self._num_places
        self._counts[4, :places] += self._sequence[:places] < request.sequence

    def _advance(self, now: float) -> None:
        """Count the time until now."""
        now_ns = int(now * _NS)
        ns = now_ns - self._since_ns
        if ns <= 0:
            return
        self._since_ns = now_ns
        if self.reason is None:
            return
        index = self.reason - 1
        self._spent_ns[index] += ns
        if self._turn is not None:
            priority, _, first = self._turn
            places = self._num_places
            is_outrun = (self._level[:places] == priority) & (self._sequence[:places] < first)
            self._counts[index, :places] += ns * is_outrun

    def _new_place(self) -> int:
        place = self._num_places
        self._num_places += 1
        if place == len(self._sequence):
            self._sequence = np.concatenate((self._sequence, np.zeros_like(self._sequence)))
            self._level = np.concatenate((self._level, np.zeros_like(self._level)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
        return place
