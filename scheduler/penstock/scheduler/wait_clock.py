"""Measures queue times by reason.

With each step the planner reports why the first request of the queue was not admitted. This reason
applies until the next step is planned.

**One clock.** Four counters run for all requests, one for each `WaitReason`. A request stores their
values when it starts to wait; the differences at the end of the wait are its times. So a step has
no cost per waiting request.

**Fairness.** Suppose that a request of a tenant is admitted by fair share (not for its age, and not
past a request that lacks blocks). Requests of other tenants in the same class would have been ahead
in arrival order if they arrived before that tenant's earliest waiting request. For these, FAIRNESS
is the reason until the next admission; for all others the reason of the step applies. Time added
for FAIRNESS is subtracted from that reason, so the parts still add up to the queue time. With one
tenant in a class, and under FCFS, no time is added.

**Passed by.** `num_passed_by` counts how often, while a request waits, a later one is admitted.

Fairness times and passed-by counts are stored in arrays over the waiting requests: an admission
takes a few array operations.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import Wait, WaitReason
from penstock.scheduler.request import Request

_NS = 1_000_000_000
FIRST_CAPACITY = 256


class WaitClock:
    """Measures the wait times of the queue. `reason`: why the first request in the queue is not
    admitted at present, None if it is not blocked.
    """

    def __init__(self) -> None:
        self.reason: WaitReason | None = None
        # Nanoseconds by reason, as of `_since_ns`.
        self._spent_ns = [0, 0, 0, 0]
        self._since_ns = 0
        # The last request admitted by fair share: its class, its tenant, and the sequence number of
        # that tenant's earliest waiting request. None if the last admission was another one.
        self._last_by_share: tuple[int, int, int] | None = None
        # By `Request.wait_index`; values at free indices are undefined.
        self._sequence: NDArray[np.int64] = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._level: NDArray[np.int64] = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        # Rows: for each reason, the nanoseconds that count as FAIRNESS instead; last row: number of
        # requests that overtook it.
        self._counts: NDArray[np.int64] = np.zeros((5, FIRST_CAPACITY), dtype=np.int64)
        self._free: list[int] = []
        self._num_indices = 0

    def note_reason(self, reason: WaitReason | None, now: float) -> None:
        """Set why the first request of the queue is not admitted, from `now` on; None if it is not
        blocked.
        """
        if reason is not self.reason:
            self._advance(now)
            self.reason = reason

    def join(self, request: Request, now: float) -> None:
        """Record that a request starts to wait."""
        self._advance(now)
        last, priority = self._last_by_share, request.spec.priority
        if last is not None and last[:2] == (priority, request.tenant):
            # After a preemption it may be the earliest arrival of its tenant.
            self._last_by_share = (priority, request.tenant, min(last[2], request.sequence))
        request.wait_index = index = self._free.pop() if self._free else self._new_index()
        self._sequence[index] = request.sequence
        self._level[index] = priority
        self._counts[:, index] = 0
        request.queue_mark = (now, tuple(self._spent_ns))

    def admit(self, request: Request, oldest: Request | None, now: float) -> Wait:
        """Record that a request is admitted; return its wait by reason.

        `oldest`: the earliest arrival among the waiting requests of its class and tenant, including
        itself; None if no other tenant waits in that class, or the request was not admitted by fair
        share.
        """
        wait = self.leave(request, now)
        self._note_passed(request)
        self._last_by_share = None
        if oldest is not None:
            first = min(request.sequence, oldest.sequence)
            self._last_by_share = (request.spec.priority, request.tenant, first)
        return wait

    def leave(self, request: Request, now: float) -> Wait:
        """Record that a request leaves the queue; return its wait by reason. Raises ValueError if
        it does not wait.
        """
        mark, request.queue_mark = request.queue_mark, None
        if mark is None:
            raise ValueError(f"request {request.spec.key} does not wait")
        self._advance(now)
        since_s, (blocks_ns, slots_ns, budget_ns, fairness_ns) = mark
        self._free.append(request.wait_index)
        # The part of each reason that counts as FAIRNESS instead.
        blocks, slots, budget, _, num_passed_by = self._counts[:, request.wait_index].tolist()
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
        """Return why a waiting request is not admitted at present: FAIRNESS if later requests of
        another tenant are preferred, else the reason of the queue; None if the queue is not
        blocked.
        """
        last = self._last_by_share
        is_overtaken = (
            last is not None and last[0] == request.spec.priority and request.sequence < last[2]
        )
        return WaitReason.FAIRNESS if is_overtaken and self.reason is not None else self.reason

    def _note_passed(self, request: Request) -> None:
        """Record that this request overtook earlier ones."""
        num = self._num_indices
        self._counts[4, :num] += self._sequence[:num] < request.sequence

    def _advance(self, now: float) -> None:
        """Add the time until `now` to the counters."""
        now_ns = int(now * _NS)
        ns = now_ns - self._since_ns
        if ns <= 0:
            return
        self._since_ns = now_ns
        if self.reason is None:
            return
        index = self.reason - 1
        self._spent_ns[index] += ns
        if self._last_by_share is not None:
            priority, _, first = self._last_by_share
            num = self._num_indices
            is_overtaken = (self._level[:num] == priority) & (self._sequence[:num] < first)
            self._counts[index, :num] += ns * is_overtaken

    def _new_index(self) -> int:
        index = self._num_indices
        self._num_indices += 1
        if index == len(self._sequence):
            self._sequence = np.concatenate((self._sequence, np.zeros_like(self._sequence)))
            self._level = np.concatenate((self._level, np.zeros_like(self._level)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
        return index
