"""Performs the state transitions of the live requests.

The transitions are enqueue, admit, preempt, finish, fail and expire. Each also updates slots,
blocks and counts, and adds its event. Which request is admitted or preempted is decided elsewhere.
Also contains the table of live requests.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.scheduler.completion import CompletionPredictor
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.deadline_predictor import DeadlinePredictor, QueueEstimate, Rejection
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.events import (
    Admitted,
    Completed,
    EventBuffer,
    Failed,
    Preempted,
    Queued,
    Residency,
    Wait,
)
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedSteps
from penstock.scheduler.quotas import QuotaAccounts
from penstock.scheduler.request import (
    NO_TIME,
    UNTRUSTED_ENDS,
    FailureReason,
    FinishReason,
    Request,
    RequestSpec,
)
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.state import RequestEvent, RequestState
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue

_TRUNCATED = {FinishReason.LENGTH, FinishReason.TIME_LIMIT, FinishReason.CANCELLED}
_LATE = {FailureReason.DEADLINE_EXCEEDED, FailureReason.DEADLINE_UNREACHABLE}


class LiveRequests(Mapping[int, Request]):
    """Live requests by key, in order of arrival, and the keys of each request id."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._keys_of: dict[str, set[int]] = {}

    def __getitem__(self, key: int) -> Request:
        return self._requests[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def has_id(self, request_id: str) -> bool:
        """Return whether an output of this request is live."""
        return request_id in self._keys_of

    def keys_of(self, request_id: str) -> tuple[int, ...]:
        """Return the keys of the live outputs of a request, ascending."""
        return tuple(sorted(self._keys_of.get(request_id, ())))

    def add(self, request: Request) -> None:
        """Add a request that joins the queue."""
        spec = request.spec
        self._requests[spec.key] = request
        self._keys_of.setdefault(spec.request_id, set()).add(spec.key)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        spec = request.spec
        del self._requests[spec.key]
        keys = self._keys_of[spec.request_id]
        keys.discard(spec.key)
        if not keys:
            del self._keys_of[spec.request_id]


class Transitions:
    """Moves requests from the queue to the running set and back, ends them, and updates all counts
    of tenants and quotas.
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a transition changes
        self,
        config: SchedulerConfig,
        *,
        requests: LiveRequests,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        launched: LaunchedSteps,
        queue: WaitingQueue,
        displacement: Displacement,
        waits: WaitClock,
        tenants: TenantCounters,
        quotas: QuotaAccounts,
        predictor: DeadlinePredictor,
        completion: CompletionPredictor,
        events: EventBuffer,
    ) -> None:
        self._requests = requests
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._launched = launched
        self._queue = queue
        self._displacement = displacement
        self._waits = waits
        self._tenants = tenants
        self._quotas = quotas
        self._predictor = predictor
        self._completion = completion
        self._events = events
        self._aging_s = config.aging_s
        self._is_fair = config.order is SchedulingOrder.FAIR
        self._next_deadline_s = NO_TIME

    def enqueue(self, outputs: Sequence[Request], estimate: QueueEstimate, now: float) -> None:
        """Add the outputs of one request to the queue, in order, and charge its tenant's quota."""
        leader = outputs[0]
        for request in outputs:
            self._enqueue(request, now, leader_key=leader.spec.key)
        self._events.changes.append(
            Queued(
                key=leader.spec.key,
                at_s=now,
                num_ahead=estimate.num_ahead,
                estimated_queue_s=estimate.queue_s,
                waits_for=self._waits.reason_of(leader),
            )
        )
        if not leader.spec.num_replays:
            self._displacement.note_submitted(outputs)
        self._quotas.charge_request(leader.spec, len(outputs), leader.tenant, now)

    def _enqueue(self, request: Request, now: float, leader_key: int) -> None:
        spec = request.spec
        self._requests.add(request)
        self._cache.renew(request, now)
        self._predictor.prepare(request)
        # The leader may come from an earlier `submit` and have released its followers already.
        if spec.leader_key == leader_key and spec.block_hashes:
            self._queue.hold(request, leader_key, now)
        else:
            self._queue.push(request, now)

    def admit(
        self,
        request: Request,
        matched: list[int],
        reserve_tokens: int,
        now: float,
        *,
        is_past_blocked: bool = False,
    ) -> None:
        """Give a waiting request a slot, the blocks of its cached prefix and a reservation.

        In fair order, its uncached prompt is charged to its tenant's service, but not again after a
        preemption.

        `matched`: the blocks of the prefix. `reserve_tokens`: tokens to reserve blocks for.
        `is_past_blocked`: it overtakes a request that lacks blocks.
        """
        arrays = self._arrays
        # First, because a tenant that leaves the queue without running requests may be dropped.
        self._tenants.start(request.tenant)
        wait, is_aged = self._queue.admit(request, now, is_past_blocked=is_past_blocked)
        request.apply(RequestEvent.ADMIT)
        request.num_overtaken, request.blocked_since_s = 0, NO_TIME
        request.num_blocks_needed = 0
        request.slot = slot = self._running.take_slot(request)
        arrays.fill(request)
        arrays.level[slot] = self._level(request, now, is_aged=is_aged)
        num_cached = len(matched) * arrays.block_size
        if self._is_fair and not request.num_preemptions:
            self._tenants.charge_prompt(request.tenant, len(request.tokens) - num_cached)
        self._cache.admit(slot, matched, reserve_tokens)
        request.num_registered_blocks = len(matched)
        self._next_deadline_s = min(
            self._next_deadline_s, float(arrays.deadline[slot]), float(arrays.time_limit[slot])
        )
        self._events.changes.append(
            Admitted(
                key=request.spec.key,
                at_s=now,
                num_cached_tokens=num_cached,
                num_preemptions=request.num_preemptions,
                wait=wait,
            )
        )

    def preempt(self, request: Request, now: float) -> None:
        """Preempt a running request: it loses its blocks and waits again; it keeps its seniority
        and its tokens.
        """
        slot = request.slot
        num_tokens = int(self._arrays.num_tokens[slot])
        request.tokens = self._arrays.token_ids[slot, :num_tokens].copy()
        residency = self._release_slot(request, now, is_trusted=True, is_end=False)
        request.apply(RequestEvent.PREEMPT)
        request.num_preemptions += 1
        self._predictor.prepare(request)
        self._queue.push(request, now)
        self._events.changes.append(Preempted(key=request.spec.key, at_s=now, residency=residency))

    def finish(self, request: Request, reason: FinishReason, now: float, stop_id: int = -1) -> None:
        """End a live request, waiting or running, as COMPLETED for `reason`."""
        wait, residency = None, None
        if request.state is RequestState.PENDING:
            wait = self._queue.leave(request, now)
            request.apply(RequestEvent.CANCEL)
        else:
            self._note_length(request, reason, now)
            residency = self._release_slot(request, now, is_trusted=True)
            is_cancel = reason is FinishReason.CANCELLED
            request.apply(RequestEvent.CANCEL if is_cancel else RequestEvent.FINISH)
        key = request.spec.key
        self._events.ends.append(
            Completed(
                key=key, at_s=now, reason=reason, stop_id=stop_id, wait=wait, residency=residency
            )
        )
        self._remove(request)

    def fail(self, request: Request, rejection: Rejection, now: float, detail: str = "") -> None:
        """End a live request as ERROR. `rejection`: the reason and the values to report; `detail`:
        the executor's error, for the log.
        """
        wait, residency = None, None
        if request.state is RequestState.PENDING:
            wait = self._queue.leave(request, now)
        else:
            self._note_length(request, rejection.reason, now)
            is_trusted = rejection.reason not in UNTRUSTED_ENDS
            residency = self._release_slot(request, now, is_trusted=is_trusted)
        request.apply(RequestEvent.FAIL)
        self._events.ends.append(
            failed(request.spec, now, rejection, detail=detail, wait=wait, residency=residency)
        )
        self._remove(request)

    def expire(self, now: float) -> None:
        """End requests past a deadline or time limit, and requests that are predicted to miss a
        deadline; also expire retention and sessions in the cache.
        """
        self._cache.pool.expire(now)
        for request in self._queue.due(now):
            self._recheck(request, now)
        for request, rejection in self._predictor.running_late(now):
            self.fail(request, rejection, now)
        if now < self._next_deadline_s:
            return
        arrays, running = self._arrays, self._running
        columns = slice(0, running.high_water)
        is_over = (arrays.deadline[columns] <= now) | (arrays.time_limit[columns] <= now)
        for slot in np.flatnonzero(is_over).tolist():
            request_there = running.request_at(slot)
            if request_there is not None:
                self._time_out(request_there, now)
        columns = slice(0, running.high_water)
        self._next_deadline_s = min(
            float(arrays.deadline[columns].min(initial=NO_TIME)),
            float(arrays.time_limit[columns].min(initial=NO_TIME)),
        )

    def next_expiry_s(self) -> float:
        """Return the next time, on the engine clock, at which a request may expire; NO_TIME if
        there is none.
        """
        running_s = self._next_deadline_s if len(self._running) else NO_TIME
        return min(self._queue.next_recheck_s(), running_s)

    def _note_length(
        self, request: Request, reason: FinishReason | FailureReason, now: float
    ) -> None:
        """Record the output length of a request that ended by a stop token or was truncated; a
        no-op after a failure other than a missed deadline of the complete output.
        """
        slot, arrays = request.slot, self._arrays
        num_generated = int(arrays.num_tokens[slot]) - int(arrays.num_prompt[slot])
        is_stop = reason is FinishReason.STOP
        if is_stop or reason in _TRUNCATED or reason in _LATE:
            self._completion.note_end(request, num_generated, now, is_cut=not is_stop)

    def _level(self, request: Request, now: float, *, is_aged: bool) -> int:
        """Return the priority class of a request at its admission.

        `is_aged`: it was admitted by age; then its age raises its class. Other admissions do not
        raise the class, since in a long queue age would raise the class of every request.
        """
        spec = request.spec
        if not is_aged:
            return spec.priority
        return spec.priority + max(0, int((now - spec.arrival_s) / self._aging_s))

    def _recheck(self, request: Request, now: float) -> None:
        limit_s = request.spec.time_limit_s
        if limit_s <= now:
            self.finish(request, FinishReason.TIME_LIMIT, now)
            return
        latest_s = self._predictor.latest_admission_s(request)
        if latest_s <= now:
            self.fail(request, self._predictor.expired_rejection(request, now), now)
        else:
            self._queue.recheck(request, min(latest_s, limit_s))

    def _time_out(self, request: Request, now: float) -> None:
        """End a running request whose time limit or deadline has passed."""
        spec = request.spec
        if spec.time_limit_s <= now:
            self.finish(request, FinishReason.TIME_LIMIT, now)
        elif spec.deadline_s <= now:
            self.fail(request, Rejection(reason=FailureReason.DEADLINE_EXCEEDED), now)
        else:
            self.fail(request, Rejection(reason=FailureReason.TTFT_DEADLINE_EXCEEDED), now)

    def _release_slot(
        self, request: Request, now: float, *, is_trusted: bool, is_end: bool = True
    ) -> Residency:
        slot, arrays, cache = request.slot, self._arrays, self._cache
        num_collected = self._launched.drop(slot, int(arrays.num_computed[slot]))
        if is_trusted:
            # Exclude tokens that a step in flight computes: it may still fail.
            num_valid = min(num_collected, int(arrays.num_tokens[slot]))
            cache.register(request, num_valid)
            if is_end:
                cache.hold(request, now)
        else:
            cache.forget(slot)
        cache.free(request, now)
        arrays.clear(slot)
        residency = self._running.release_slot(slot)
        if self._tenants.stop(request.tenant):
            self._queue.order.release(request.tenant)
        request.slot = -1
        return residency

    def _remove(self, request: Request) -> None:
        self._predictor.forget(request)
        self._requests.remove(request)
        self._quotas.release(request.spec.tenant)
        self._queue.replace_leader(request.spec.key)


def failed(
    spec: RequestSpec,
    now: float,
    rejection: Rejection,
    *,
    detail: str = "",
    wait: Wait | None = None,
    residency: Residency | None = None,
) -> Failed:
    """Return the event of a request that failed at `now`; with a `detail` it also contains the
    request's ids.
    """
    return Failed(
        key=spec.key,
        at_s=now,
        reason=rejection.reason,
        request_id=spec.request_id if detail else "",
        trace_id=spec.trace_id if detail else b"",
        detail=detail,
        estimate_s=rejection.estimate_s,
        deadline_s=rejection.deadline_s,
        chance=rejection.chance,
        retry_after_s=rejection.retry_after_s,
        breach=rejection.breach,
        wait=wait,
        residency=residency,
    )
