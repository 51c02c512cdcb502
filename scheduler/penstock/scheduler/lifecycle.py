"""The state of every live request, and its transitions.

Owns the tables of requests, the queue, the slots, the blocks and the events that follow from a
change: submit, admit, preempt, finish, cancel, fail, expire. Every transition of the state table
happens here, together with the memory it takes or releases. Does not choose which request is
admitted or preempted, nor how many tokens any computes.
"""

from collections import deque

import numpy as np

from penstock.scheduler.admission_control import AdmissionControl
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.deadline_predictor import DeadlinePredictor, Rejection
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    PrefixFound,
    Queued,
    Stay,
    Wait,
)
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.fair_order import FairOrder
from penstock.scheduler.hit_density_order import eviction_order_of
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedStep
from penstock.scheduler.queue_order import ArrivalOrder
from penstock.scheduler.quotas import QuotaAccounts
from penstock.scheduler.request import (
    NO_TIME,
    UNTRUSTED_ENDS,
    FailureReason,
    FinishReason,
    Request,
    RequestSpec,
)
from penstock.scheduler.retention import EngineRetention, RetentionCuts, retention_budget
from penstock.scheduler.running import RunningSet
from penstock.scheduler.sessions import sessions_of
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.state import RequestEvent, RequestState
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue
from penstock.scheduler.waiting_sums import WaitingSums

_CUTS = {FinishReason.LENGTH, FinishReason.TIME_LIMIT, FinishReason.CANCELLED}
_LATE = {FailureReason.DEADLINE_EXCEEDED, FailureReason.DEADLINE_UNREACHABLE}


class Lifecycle:
    """The requests of one engine.

    `changes`, `ends`: events since they were last taken. `admitted`, `released`: for the next
    batch. `flights`: launched steps that were not collected, oldest first; a released slot is
    recorded in each, so that its late tokens are dropped. `is_behind`: an executor returned several
    tokens of a slot at once, and the tables catch up when the next step is planned. `waits`: the
    reasons of waiting.
    """

    def __init__(self, info: ExecutorInfo, config: SchedulerConfig) -> None:
        self.arrays = SlotArrays(
            num_slots=info.max_num_seqs,
            # No row is longer than the whole cache and the token that is never computed, whatever
            # the model's limit.
            max_seq_len=min(info.max_seq_len, info.num_blocks * info.block_size + 1),
            block_size=info.block_size,
        )
        self.cache = KVCache(
            self.arrays,
            info.num_blocks,
            sessions_of(config, info),
            eviction_order_of(config, info),
            retention_budget(config, info.num_blocks),
        )
        self.running = RunningSet(self.arrays)
        self.tenants = Tenants(config)
        self.quotas = QuotaAccounts({}, config.tenant_quota)
        self.is_fair = config.order is SchedulingOrder.FAIR
        self.queue = WaitingQueue(
            FairOrder(self.tenants, config) if self.is_fair else ArrivalOrder(),
            self.tenants,
            WaitingSums(config, info.block_size),
            Displacement(config, self.tenants),
        )
        self.outlook = DeadlinePredictor(
            info,
            config,
            arrays=self.arrays,
            cache=self.cache,
            running=self.running,
            queue=self.queue,
            tenants=self.tenants,
        )
        self.waits = WaitClock()
        self.requests: dict[int, Request] = {}
        self.changes: list[Queued | Admitted | Preempted | PrefixFound] = []
        self.ends: list[Finished | Failed] = []
        self.admitted: list[Request] = []
        self.released: list[int] = []
        self.is_behind = False
        self._keys_of: dict[str, set[int]] = {}
        self._config = config
        self._engine_retention = EngineRetention(config, info) if info.is_self_paced else None
        self._door = AdmissionControl(
            info,
            config,
            cache=self.cache,
            queue=self.queue,
            tenants=self.tenants,
            quotas=self.quotas,
            outlook=self.outlook,
            keys=self.requests,
            request_ids=self._keys_of,
        )
        self._next_sequence = 0
        self._next_deadline_s = NO_TIME
        self.flights: deque[LaunchedStep] = deque()

    @property
    def retention_cuts(self) -> RetentionCuts:
        """What the retention budget has cut, here or for the executor."""
        if self._engine_retention is not None:
            return self._engine_retention.cuts
        return self.cache.pool.retention_cuts

    @property
    def has_place(self) -> bool:
        """Whether one more may run: there is a slot, and the batch limit allows it."""
        running = self.running
        return running.has_free_slot and len(running) < self.outlook.pace.max_num_running

    def submit(self, specs: tuple[RequestSpec, ...], now: float) -> None:
        """Queue the outputs of one request, leader first, all of them or none.

        A refusal becomes one `Failed` end per spec.
        """
        if self._engine_retention is not None:
            specs = self._engine_retention.limit(specs, now)
        requests = [
            Request(
                spec=spec,
                sequence=sequence,
                tokens=spec.prompt_ids,
                block_hashes=list(spec.block_hashes),
                is_trial=spec.num_replays > 0,
            )
            for sequence, spec in enumerate(specs, self._next_sequence)
        ]
        prospect = self._door.look_at(requests, now)
        if prospect.verdict is not None:
            self.ends.extend(_failed(spec, now, prospect.verdict) for spec in specs)
            return
        for request in prospect.displaced:
            verdict = self.outlook.crowded(request, FailureReason.QUEUE_FULL, now)
            self.drop(request, verdict, now)
        self._next_sequence += len(specs)
        self._keys_of[specs[0].request_id] = {spec.key for spec in specs}
        self.changes.append(
            Queued(
                key=specs[0].key,
                at_s=now,
                num_ahead=prospect.num_ahead,
                estimated_queue_s=prospect.queue_s,
            )
        )
        for request in requests:
            self._wait(request, now, leader_key=specs[0].key)
        if not specs[0].num_replays:
            self.queue.places.note_submitted(requests)
        self.quotas.take_in(specs[0], len(specs), requests[0].tenant, now)

    def _wait(self, request: Request, now: float, leader_key: int) -> None:
        spec = request.spec
        self.requests[spec.key] = request
        self.waits.seat(request, self.requests.values())
        self.waits.join(request, now)
        self.cache.renew(request, now)
        self.outlook.prepare(request)
        # A leader outside this submit may have released its followers already, and would not again.
        if spec.leader_key == leader_key and spec.block_hashes:
            self.queue.hold(request, leader_key)
        else:
            self.queue.push(request)

    def keys_of(self, request_id: str) -> tuple[int, ...]:
        """Keys of the live outputs of a request, in order of output."""
        return tuple(sorted(self._keys_of.get(request_id, ())))

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

        `is_past_blocked`: it overtakes one that lacks blocks.
        """
        order = self.queue.order
        is_aged = order.note_admission(request)
        is_in_turn = not (is_aged or is_past_blocked)
        wait = self.waits.admit(request, order.eldest_beside(request) if is_in_turn else None, now)
        self.tenants.start(request.tenant)
        self.queue.remove(request)
        request.apply(RequestEvent.ADMIT)
        request.num_overtaken, request.blocked_since_s = 0, NO_TIME
        request.num_blocks_short = 0
        request.slot = self.running.enter(request)
        self.arrays.fill(request)
        self.arrays.level[request.slot] = self._level(request, now, is_aged=is_aged)
        if self.is_fair and not request.num_preemptions:
            num_uncached = len(request.tokens) - len(matched) * self.arrays.block_size
            self.tenants.charge_prompt(request.tenant, num_uncached)
        self.cache.admit(request.slot, matched, reserve_tokens)
        request.num_registered_blocks = len(matched)
        self.admitted.append(request)
        self._next_deadline_s = min(
            self._next_deadline_s,
            float(self.arrays.deadline[request.slot]),
            float(self.arrays.time_limit[request.slot]),
        )
        self.changes.append(
            Admitted(
                key=request.spec.key,
                at_s=now,
                num_cached_tokens=len(matched) * self.arrays.block_size,
                num_preemptions=request.num_preemptions,
                wait=wait,
            )
        )

    def preempt(self, request: Request, now: float) -> None:
        """Preempt a running request: it loses its blocks and waits again with its seniority and its
        tokens.
        """
        slot = request.slot
        num_tokens = int(self.arrays.num_tokens[slot])
        request.tokens = self.arrays.token_ids[slot, :num_tokens].copy()
        stay = self._vacate(request, now, is_trusted=True, is_end=False)
        request.apply(RequestEvent.PREEMPT)
        request.num_preemptions += 1
        self.outlook.prepare(request)
        self.queue.push(request)
        self.waits.join(request, now)
        self.changes.append(Preempted(key=request.spec.key, at_s=now, stay=stay))

    def finish(self, request: Request, reason: FinishReason, now: float, stop_id: int = -1) -> None:
        """Complete a live request; a waiting one is cancelled, a running one is finished."""
        wait, stay = None, None
        if request.state is RequestState.PENDING:
            wait = self._leave_queue(request, now)
            request.apply(RequestEvent.CANCEL)
        else:
            self._note_length(request, reason)
            stay = self._vacate(request, now, is_trusted=True)
            is_cancel = reason is FinishReason.CANCELLED
            request.apply(RequestEvent.CANCEL if is_cancel else RequestEvent.FINISH)
        key = request.spec.key
        self.ends.append(
            Finished(key=key, at_s=now, reason=reason, stop_id=stop_id, wait=wait, stay=stay)
        )
        self._bury(request)

    def fail(self, request: Request, reason: FailureReason, now: float, detail: str = "") -> None:
        """End a live request in ERROR; `detail` is the executor's."""
        self._end_in_error(request, Rejection(reason=reason), now, detail)

    def drop(self, request: Request, verdict: Rejection, now: float) -> None:
        """End a request that would be late."""
        self._end_in_error(request, verdict, now)

    def _end_in_error(
        self, request: Request, verdict: Rejection, now: float, detail: str = ""
    ) -> None:
        wait, stay = None, None
        if request.state is RequestState.PENDING:
            wait = self._leave_queue(request, now)
        else:
            self._note_length(request, verdict.reason)
            is_suspect = verdict.reason in UNTRUSTED_ENDS
            stay = self._vacate(request, now, is_trusted=not is_suspect)
        request.apply(RequestEvent.FAIL)
        self.ends.append(_failed(request.spec, now, verdict, detail=detail, wait=wait, stay=stay))
        self._bury(request)

    def expire(self, now: float) -> None:
        """End requests whose time is up, and those that wait for an event that can no
        longer come.
        """
        self.cache.pool.expire(now)
        for request in self.queue.due(now):
            self._reconsider(request, now)
        for request, verdict in self.outlook.given_up(now):
            self.drop(request, verdict, now)
        if now < self._next_deadline_s:
            return
        columns = slice(0, self.running.high_water)
        deadline, limit = self.arrays.deadline[columns], self.arrays.time_limit[columns]
        for slot in np.flatnonzero((deadline <= now) | (limit <= now)).tolist():
            request_there = self.running.request_at(slot)
            if request_there is not None:
                self._time_out(request_there, now)
        columns = slice(0, self.running.high_water)
        self._next_deadline_s = min(
            float(self.arrays.deadline[columns].min(initial=NO_TIME)),
            float(self.arrays.time_limit[columns].min(initial=NO_TIME)),
        )

    def next_expiry_s(self) -> float:
        """When time may end a request, waiting or running; NO_TIME when it never does."""
        running_s = self._next_deadline_s if len(self.running) else NO_TIME
        return min(self.queue.next_recheck_s(), running_s)

    def note_first_token(self, request: Request, now: float) -> None:
        """The TTFT deadline is met."""
        if request.first_token_s == NO_TIME:
            request.first_token_s = now
            self.arrays.deadline[request.slot] = request.spec.deadline_s

    def _note_length(self, request: Request, reason: FinishReason | FailureReason) -> None:
        """An end by itself, at the limit or by time is a sample of output lengths."""
        slot, arrays = request.slot, self.arrays
        num_generated = int(arrays.num_tokens[slot]) - int(arrays.num_prompt[slot])
        is_stop = reason is FinishReason.STOP
        if is_stop or reason in _CUTS or reason in _LATE:
            self.outlook.completion.note_end(request.spec, num_generated, is_cut=not is_stop)

    def _level(self, request: Request, now: float, *, is_aged: bool) -> int:
        """The class of a request, risen by its age if it was admitted for that.

        Not otherwise: under a flood every request in the long queue is old.
        """
        spec, aging_s = request.spec, self._config.aging_s
        if not is_aged:
            return spec.priority
        return spec.priority + max(0, int((now - spec.arrival_s) / aging_s))

    def _reconsider(self, request: Request, now: float) -> None:
        limit_s = request.spec.time_limit_s
        if limit_s <= now:
            self.finish(request, FinishReason.TIME_LIMIT, now)
            return
        hopeless_s = self.outlook.hopeless_s(request)
        if hopeless_s <= now:
            self.drop(request, self.outlook.dropped(request, now), now)
        else:
            self.queue.recheck(request, min(hopeless_s, limit_s))

    def _time_out(self, request: Request, now: float) -> None:
        """Of a running request."""
        spec = request.spec
        if spec.time_limit_s <= now:
            self.finish(request, FinishReason.TIME_LIMIT, now)
        elif spec.deadline_s <= now:
            self.fail(request, FailureReason.DEADLINE_EXCEEDED, now)
        else:
            self.fail(request, FailureReason.TTFT_DEADLINE_EXCEEDED, now)

    def _leave_queue(self, request: Request, now: float) -> Wait:
        self.queue.remove(request)
        return self.waits.leave(request, now)

    def _vacate(
        self, request: Request, now: float, *, is_trusted: bool, is_end: bool = True
    ) -> Stay:
        slot, arrays = request.slot, self.arrays
        num_collected = self._drop_from_flights(slot)
        if is_trusted:
            # Not what a step in flight writes: that step may still fail.
            num_valid = min(num_collected, int(arrays.num_tokens[slot]))
            self.cache.register(request, num_valid)
            if is_end:
                self.cache.hold(request, now)
        else:
            self.cache.forget(slot)
        self.cache.free(request, now)
        arrays.clear(slot)
        stay = self.running.stays.end(slot)
        self.running.leave(slot)
        if self.tenants.stop(request.tenant):
            self.queue.order.release(request.tenant)
        request.slot = -1
        self.released.append(slot)
        return stay

    def _drop_from_flights(self, slot: int) -> int:
        """Record in every launched step that a slot is released.

        Returns how many of its tokens were computed by steps that have been collected.
        """
        num_collected = int(self.arrays.num_computed[slot])
        for flight in self.flights:
            # Once dropped, a row belongs to an earlier request in the same slot.
            if slot not in flight.dropped:
                starts = flight.batch.starts[flight.batch.slots == slot]
                num_collected = min([num_collected, *starts.tolist()])
                flight.dropped.add(slot)
        return num_collected

    def _bury(self, request: Request) -> None:
        spec = request.spec
        self.outlook.prefixes.remove(request)
        del self.requests[spec.key]
        keys = self._keys_of[spec.request_id]
        keys.discard(spec.key)
        if not keys:
            del self._keys_of[spec.request_id]
        self.quotas.release(spec.tenant)
        self.queue.replace_leader(spec.key)


def _failed(
    spec: RequestSpec,
    now: float,
    verdict: Rejection,
    *,
    detail: str = "",
    wait: Wait | None = None,
    stay: Stay | None = None,
) -> Failed:
    """The end of a request at `now`; its ids are added to an executor's error."""
    return Failed(
        key=spec.key,
        at_s=now,
        reason=verdict.reason,
        request_id=spec.request_id if detail else "",
        trace_id=spec.trace_id if detail else b"",
        detail=detail,
        estimate_s=verdict.estimate_s,
        deadline_s=verdict.deadline_s,
        chance=verdict.chance,
        retry_after_s=verdict.retry_after_s,
        breach=verdict.breach,
        wait=wait,
        stay=stay,
    )
