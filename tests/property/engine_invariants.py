"""The invariants of an engine. They are checked after every turn, on the state of the engine and on
the events that clients received.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.executor.fault import FaultKind
from penstock.executor.simulated.clock import VirtualClock
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig, SchedulingOrder
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import (
    Admitted,
    Completed,
    Failed,
    Preempted,
    Queued,
    Residency,
    StepEvents,
    Wait,
)
from penstock.scheduler.fair_order import MAX_SKIPPED_PER_TENANT, FairOrder
from penstock.scheduler.request import NO_TIME, FailureReason, FinishReason, Request
from penstock.scheduler.state import RequestState
from penstock.scheduler.tenant_counters import TenantCounters

if TYPE_CHECKING:
    from property.engine_machine import EngineMachine, Output

TOLERANCE_S = 1e-6
MAX_TURNS_ALONE = 200


def check_accounts(machine: EngineMachine) -> None:
    """Check that the engine's accounting agrees with the outputs that its clients expect.

    Raises AssertionError in these cases: the engine's integrity check fails; other requests are
    live, running or waiting than expected, or have other numbers of tokens; a limit of the queue or
    of a tenant is exceeded (preempted requests do not count as waiting); the engine sleeps beyond a
    deadline.
    """
    engine, config, live = machine.engine, machine.config, machine.live
    engine.check_integrity()
    engine.check_next_piece()
    assert live.keys() == engine.requests.keys()
    for key, output in live.items():
        request = engine.requests[key]
        assert (request.state is RequestState.PROCESSING) is output.is_running
        num_known = (
            int(engine.arrays.num_tokens[request.slot])
            if output.is_running
            else len(request.tokens)
        )
        assert num_known == output.spec.num_prompt_tokens + len(output.tokens)
    waiting = [output for output in live.values() if not output.is_running]
    assert len(engine.queue) == len(waiting)
    fresh = [output for output in waiting if not output.num_preemptions]
    assert len(fresh) <= config.max_num_waiting
    assert sum(one.spec.num_prompt_tokens for one in fresh) <= config.max_num_waiting_tokens
    running = [output for output in live.values() if output.is_running]
    for outputs, most in (
        (fresh, config.max_num_waiting_per_tenant),
        (running, config.max_num_running_per_tenant),
    ):
        tenants = [output.spec.tenant for output in outputs]
        assert most is None or all(tenants.count(tenant) <= most for tenant in set(tenants))
    first_s = min((output.expiry_s for output in live.values()), default=NO_TIME)
    assert engine.next_wakeup_s() <= first_s, "the engine sleeps past a deadline"


# What a client may receive.

BEFORE_ADMISSION = (
    FailureReason.PROMPT_TOO_LONG,
    FailureReason.EXCEEDS_KV_CACHE,
    FailureReason.TENANT_OVER_QUOTA,
    FailureReason.QUEUE_FULL,
)
LATE = (
    FailureReason.TTFT_DEADLINE_EXCEEDED,
    FailureReason.DEADLINE_EXCEEDED,
    FailureReason.TTFT_DEADLINE_UNREACHABLE,
    FailureReason.DEADLINE_UNREACHABLE,
)


def check_queued(machine: EngineMachine, output: Output, queued: Queued) -> None:
    """Check that a Queued event is the only one of its request, names the first output, and
    precedes its admission, and that its estimates are possible.
    """
    assert output.num_queued == 1
    assert output.spec.leader_key == 0
    assert output.num_admissions == 0
    assert 0 <= queued.num_ahead <= machine.config.max_num_waiting
    assert is_duration(queued.estimated_queue_s)


def check_cached(machine: EngineMachine, output: Output, admitted: Admitted) -> None:
    """Check that the cached tokens are whole blocks of a salted request, without the last token,
    which must be computed.
    """
    assert admitted.num_preemptions == output.num_preemptions
    assert 0 <= admitted.num_cached_tokens < output.spec.num_prompt_tokens + len(output.tokens)
    assert admitted.num_cached_tokens % machine.device.block_size == 0
    assert output.spec.hash_salt or not admitted.num_cached_tokens


def check_end(machine: EngineMachine, output: Output, end: Completed | Failed) -> None:
    if isinstance(end, Failed):
        _check_failure(machine, output, end)
        return
    stop_ids = output.spec.stop_ids
    is_stopped = output.reference[-1] in stop_ids
    if output.cancelled_as is not None:
        assert end.reason is output.cancelled_as
    elif end.reason is FinishReason.TIME_LIMIT:
        assert machine.clock() >= output.spec.time_limit_s
    else:
        assert len(output.tokens) == len(output.reference)
        assert end.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert end.stop_id == (stop_ids[0] if is_stopped else -1)


def _check_failure(machine: EngineMachine, output: Output, end: Failed) -> None:
    """Check that the reported reason of a failure applies, and that its estimates are possible."""
    is_never = end.retry_after_s == math.inf
    assert is_duration(end.estimate_s)
    assert is_duration(end.deadline_s)
    assert is_duration(end.retry_after_s) or (is_never and end.reason in LATE)
    _check_reason(machine, output, end)
    if end.reason in BEFORE_ADMISSION:
        assert output.num_admissions == 0
        # At a full queue a waiting request may be displaced by another.
        assert output.num_queued == 0 or end.reason is FailureReason.QUEUE_FULL
    if is_never and end.chance is None and not output.num_admissions:
        assert is_late_alone(machine, output), "never to be retried, but alone it is in time"


def _check_reason(machine: EngineMachine, output: Output, end: Failed) -> None:
    spec, now, info = output.spec, machine.clock(), machine.executor.info
    match end.reason:
        case FailureReason.PROMPT_TOO_LONG:
            assert spec.max_total_tokens > info.max_seq_len
        case FailureReason.EXCEEDS_KV_CACHE:
            assert -(-(spec.max_total_tokens - 1) // info.block_size) > info.num_blocks
        case FailureReason.DEADLINE_EXCEEDED:
            assert now >= spec.deadline_s
        case FailureReason.TTFT_DEADLINE_EXCEEDED:
            assert now >= spec.ttft_deadline_s
            assert not output.tokens
        case FailureReason.EXECUTOR_REQUEST_FAILED:
            assert any(
                fault.kind is FaultKind.REQUEST_FAILS for fault in machine.device.simulated.faults
            )
        case FailureReason.TENANT_OVER_QUOTA:
            assert machine.config.max_num_waiting_per_tenant is not None
        case FailureReason.TTFT_DEADLINE_UNREACHABLE:
            assert not output.tokens
            _check_unreachable(machine, output, end, spec.ttft_deadline_s)
        case FailureReason.DEADLINE_UNREACHABLE:
            _check_unreachable(machine, output, end, spec.deadline_s)
        case _:
            assert end.reason is FailureReason.QUEUE_FULL, f"{end.reason.name} was never caused"


def _check_unreachable(
    machine: EngineMachine, output: Output, end: Failed, deadline_s: float
) -> None:
    """Check the failure of a request that was rejected or dropped before its deadline."""
    spec, config = output.spec, machine.config
    assert config.deadline_admission
    assert end.at_s < deadline_s < NO_TIME
    # A running request is dropped only because of its low chance of meeting the deadline.
    assert end.chance is not None or not output.is_running
    assert end.chance is None or (config.min_deadline_chance > 0.0 and 0.0 <= end.chance < 1.0)
    assert end.estimate_s is not None
    assert end.deadline_s is not None
    assert end.retry_after_s is not None
    assert math.isclose(end.deadline_s, deadline_s - spec.arrival_s, abs_tol=TOLERANCE_S)
    assert end.estimate_s >= end.deadline_s - TOLERANCE_S
    is_company = sum(one.spec.request_id == spec.request_id for one in machine.history) > 1
    was_alone = output.was_alone and not is_company and end.at_s <= spec.arrival_s
    if was_alone and end.chance is None:
        assert is_late_alone(machine, output), "rejected, but alone it is in time"


def is_late_alone(machine: EngineMachine, output: Output) -> bool:
    """Return whether the request misses a deadline in an engine without other requests. Also True
    if this is unknown: without the exact cost, or with a latency target, because a target may slow
    down prefill.
    """
    config = machine.config
    if config.known_cost != machine.device.simulated.cost or config.target_itl_s is not None:
        return True
    spec = output.spec
    clock = VirtualClock(spec.arrival_s)
    device = replace(machine.device, simulated=replace(machine.device.simulated, faults=()))
    config = replace(config, deadline_admission=False)
    engine = Engine(SimulatedExecutor(device, clock=clock), config, clock)
    timeless = replace(spec, ttft_deadline_s=NO_TIME, deadline_s=NO_TIME, time_limit_s=NO_TIME)
    engine.submit((timeless,))
    first_s = NO_TIME
    for _ in range(MAX_TURNS_ALONE):
        if not engine.has_work:
            break
        events = engine.step()
        if len(events.tokens):
            first_s = min(first_s, events.at_s)
    engine.close()
    is_first_late = first_s >= spec.ttft_deadline_s - TOLERANCE_S
    return is_first_late or clock() >= spec.deadline_s - TOLERANCE_S


def is_duration(seconds: float | None) -> bool:
    """Return whether `seconds` is None or a finite, non-negative number."""
    return seconds is None or (math.isfinite(seconds) and seconds >= 0.0)


# The order of admissions and preemptions, checked before the events of a turn are received.


def check_order(machine: EngineMachine, events: StepEvents) -> None:
    """Check that the right requests were admitted and preempted: by seniority in the order FCFS, by
    priority class and tenant in the order FAIR.
    """
    preempted = {change.key for change in events.changes if isinstance(change, Preempted)}
    admitted = {change.key for change in events.changes if isinstance(change, Admitted)}
    if not (preempted or admitted):
        return
    # The other policy never preempts.
    assert not preempted or machine.config.admission_policy is AdmissionPolicy.MAX_UTILIZATION
    if preempted and admitted:
        _check_tenant_preemption(machine, events)
    ended = {end.key for end in events.ends}
    live = {key: output for key, output in machine.live.items() if key not in ended}
    victims = [live[key] for key in preempted & live.keys()]
    left = [one for key, one in live.items() if one.is_running and key not in preempted]
    if machine.config.order is SchedulingOrder.FCFS:
        _check_seniority(machine, events, live, left)
        return
    _check_victims(machine, victims, left, admitted)
    for key in admitted & machine.engine.requests.keys() & live.keys():
        output, slot = live[key], machine.engine.requests[key].slot
        output.level = int(machine.engine.arrays.level[slot])
        assert output.spec.priority <= output.level <= _highest_level(machine, output)
    # Preempted requests come before new ones of their class and tenant.
    lines = {
        output.line
        for key, output in live.items()
        if output.num_preemptions and not output.is_running and key not in admitted
    }
    for output in (live[key] for key in admitted & live.keys()):
        assert output.num_preemptions or output.line not in lines


def _check_tenant_preemption(machine: EngineMachine, events: StepEvents) -> None:
    """Check a step that preempted requests and admitted others. Only tenant preemption allows this.

    No admitted request is of a lower class than any request preempted before it.
    """
    assert machine.config.order is SchedulingOrder.FAIR
    assert math.isfinite(machine.config.yield_ratio)
    highest = -math.inf
    for change in events.changes:
        if isinstance(change, Preempted):
            highest = max(highest, machine.outputs[change.key].level)
        elif isinstance(change, Admitted):
            assert _highest_level(machine, machine.outputs[change.key]) >= highest


def _highest_level(machine: EngineMachine, output: Output) -> float:
    """Return the highest class that a request may have now: its priority plus one per `aging_s`
    since arrival.
    """
    return output.spec.priority + (machine.clock() - output.spec.arrival_s) / machine.config.aging_s


def _check_seniority(
    machine: EngineMachine, events: StepEvents, live: dict[int, Output], left: list[Output]
) -> None:
    """Check that an admitted request is older than every waiting request, except outputs that may
    wait for their leader, and that a preempted request is newer than every running request.
    """
    running = {key for key, output in live.items() if output.is_running}
    for change in events.changes:
        output = machine.outputs[change.key]
        if isinstance(change, Preempted):
            assert all(other.rank < output.rank for other in left)
        elif isinstance(change, Admitted):
            # Outputs after the first may wait for their leader.
            waiting = [other for key, other in live.items() if key not in running]
            assert all(other.rank >= output.rank for other in waiting if not other.spec.leader_key)
            running.add(change.key)


def _check_victims(
    machine: EngineMachine, victims: list[Output], left: list[Output], admitted: set[int]
) -> None:
    """Check that a request is preempted only if no request of a lower class keeps running, or if
    tenant preemption favours a request of another tenant and of no lower class.
    """
    favoured = [
        machine.outputs[key] for key in admitted if math.isfinite(machine.config.yield_ratio)
    ]
    for victim in victims:
        is_lowest = all(victim.level <= other.level for other in left)
        assert is_lowest or any(
            one.spec.tenant != victim.spec.tenant and _highest_level(machine, one) >= victim.level
            for one in favoured
        )


class WatchedFairOrder(FairOrder):
    """The fair order with checks of what batch_admission.py states about passing requests over.

    A round begins with the first request that lacks blocks, the head. In a round at most
    `max_lookahead` requests are passed over, a few of each class and tenant, and no preempted one.
    Over all rounds at most `max_num_overtakes` requests are admitted before one head, and none
    later than `max_overtake_s` after it was first found blocked.
    """

    def __init__(self, tenants: TenantCounters, config: SchedulerConfig) -> None:
        super().__init__(tenants, config)
        self._config = config
        self._now = 0.0
        self._passed_over: list[Request] = []
        # Of each blocked head: since when, and how many requests passed it.
        self._blocked: dict[int, tuple[float, int]] = {}

    def discard(self, request: Request) -> None:
        self._blocked.pop(request.ticket, None)
        super().discard(request)

    def peek(self, now: float) -> Request | None:
        self._now = now
        return super().peek(now)

    def skip(self, request: Request) -> None:
        self._passed_over.append(request)
        lines = [(one.spec.priority, one.tenant) for one in self._passed_over]
        assert len(lines) <= self._config.max_lookahead
        assert lines.count(lines[-1]) <= MAX_SKIPPED_PER_TENANT
        assert not request.num_preemptions, "a preempted request is not passed"
        if len(lines) == 1:
            self._blocked.setdefault(request.ticket, (self._now, 0))
        super().skip(request)

    def note_admission(self, request: Request) -> bool:
        self._blocked.pop(request.ticket, None)
        if self._passed_over:
            head = self._passed_over[0].ticket
            since_s, num_overtaken = self._blocked[head]
            self._blocked[head] = (since_s, num_overtaken + 1)
            assert num_overtaken < self._config.max_num_overtakes
            assert self._now - since_s <= self._config.max_overtake_s
        return super().note_admission(request)

    def end_round(self) -> None:
        self._passed_over.clear()
        super().end_round()


# The engine's reports of how requests waited and ran, compared with outside observations.


def check_waits(machine: EngineMachine, events: StepEvents, num_batches: int) -> None:
    """Check every wait and residency in a turn's events, before `machine` receives the events.

    `num_batches`: number of batches launched before this turn.
    """
    running = {key for key, output in machine.live.items() if output.is_running}
    least = {key: output.num_passed_by for key, output in machine.live.items()}
    for change in events.changes:
        output = machine.outputs[change.key]
        if isinstance(change, Admitted):
            assert change.wait is not None
            assert change.wait.num_passed_by == output.num_passed_by
            _check_wait(machine, output, change.wait, change.at_s)
            running.add(change.key)
            output.first_batch = num_batches
            for key, other in machine.live.items():
                is_passed = key not in running and other.sequence < output.sequence
                other.num_passed_by += is_passed
        elif isinstance(change, Preempted):
            assert change.residency is not None
            running.discard(change.key)
            _check_residency(machine, output, change.residency, num_batches)
            output.waits_since_s = change.at_s
            output.num_passed_by = least[change.key] = 0
    first_keys = {change.key for change in events.changes}
    for end in events.ends:
        output, is_running = machine.outputs[end.key], end.key in running
        was_rejected = (
            isinstance(end, Failed)
            and output.is_new
            and (output.spec.leader_key or output.spec.key) not in first_keys
        )
        assert (end.residency is not None) is is_running
        assert (end.wait is not None) is not (is_running or was_rejected)
        if end.residency is not None:
            _check_residency(machine, output, end.residency, len(machine.executor.batches))
        if end.wait is not None:
            _check_wait(machine, output, end.wait, end.at_s)
            # When in this turn it ended is not reported.
            assert least[end.key] <= end.wait.num_passed_by <= output.num_passed_by


def _check_wait(machine: EngineMachine, output: Output, wait: Wait, at_s: float) -> None:
    """Check that no part of the wait is negative, and that the sum of its parts is the time in the
    queue.
    """
    parts = (wait.blocks_s, wait.slots_s, wait.token_budget_s, wait.fairness_s, wait.other_s)
    assert min(parts) >= 0.0
    assert abs(sum(parts) - (at_s - output.waits_since_s)) <= TOLERANCE_S
    assert machine.config.order is SchedulingOrder.FAIR or not wait.fairness_s


def _check_residency(
    machine: EngineMachine, output: Output, residency: Residency, num_batches: int
) -> None:
    """Check a residency's numbers of steps and prompt chunks against the batches that contained the
    request since its last admission. A chunk that is run again counts once. `num_batches`: number
    of batches launched before the residency ended.
    """
    key, num_steps, num_chunks, furthest = output.spec.key, 0, 0, 0
    for ends, prefilled in machine.executor.batches[output.first_batch : num_batches]:
        if key in ends:
            num_steps += 1
            # A request without a result is run again: nothing new is computed.
            num_chunks += key in prefilled and ends[key] > furthest
            furthest = max(furthest, ends[key])
    assert (residency.num_steps, residency.num_chunks) == (num_steps, num_chunks)
