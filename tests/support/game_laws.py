"""The invariants of a game after every turn, checked on the events that clients received."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.fault import FaultKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.pace import VirtualClock
from penstock.scheduler.config import AdmissionPolicy, SchedulingOrder
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    Queued,
    Stay,
    StepEvents,
    Wait,
)
from penstock.scheduler.request import NO_TIME, FailureReason, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from support.game_records import Game, Told

# What must be true of the engine's books after every turn, by what clients were reported.


def check_accounts(game: Game) -> None:
    """Check blocks, slots, queue and wake-up of `game` after a turn."""
    game.engine.check_integrity()
    game.engine.check_next_piece()
    _check_blocks(game)
    _check_members(game)
    _check_wakeup(game)
    _check_sessions(game)


def _check_blocks(game: Game) -> None:
    """Check that free + cached + used = all; used blocks are those in the tables; requests that do
    not run have none.
    """
    arrays, pool = game.engine.arrays, game.engine.cache.pool
    keys, counts = arrays.key.tolist(), arrays.num_blocks.tolist()
    held: set[int] = set()
    for slot, (key, count) in enumerate(zip(keys, counts, strict=True)):
        assert bool(key) is bool(count), f"slot {slot} of request {key} holds {count} blocks"
        if count:
            held.update(arrays.block_table[slot, :count].tolist())
    assert pool.num_used == len(held)
    num_free = pool.num_available - pool.num_cached
    assert num_free >= 0
    assert num_free + pool.num_cached + len(held) == pool.num_blocks


def _check_members(game: Game) -> None:
    """Check that the engine and the clients agree on live, running and waiting requests and
    tokens.
    """
    assert game.live.keys() == game.engine.requests.keys()
    num_waiting = 0
    for key, told in game.live.items():
        request = game.engine.requests[key]
        assert (request.state is RequestState.PROCESSING) is told.is_running
        if told.is_running:
            num_known = int(game.engine.arrays.num_tokens[request.slot])
        else:
            num_waiting += 1
            num_known = len(request.tokens)
        assert num_known == told.spec.num_prompt_tokens + len(told.tokens)
    assert len(game.engine.queue) == num_waiting
    _check_bounds(game)


def _check_bounds(game: Game) -> None:
    """Check that the queue is within its limits, not counting preempted requests."""
    config, fresh = game.config, [told for told in game.waiting() if not told.num_preemptions]
    assert len(fresh) <= config.max_num_waiting
    assert sum(told.spec.num_prompt_tokens for told in fresh) <= config.max_num_waiting_tokens
    most = config.max_num_waiting_per_tenant
    for tenant in {told.spec.tenant for told in fresh} if most is not None else ():
        assert most is not None
        assert sum(told.spec.tenant == tenant for told in fresh) <= most
    most = config.max_num_running_per_tenant
    running = [told.spec.tenant for told in game.live.values() if told.is_running]
    assert most is None or all(running.count(tenant) <= most for tenant in set(running))


def _check_wakeup(game: Game) -> None:
    """Check that no deadline passes while the engine sleeps."""
    first_s = min((told.expiry_s for told in game.live.values()), default=None)
    assert first_s is None or game.engine.next_wakeup_s() <= first_s


def _check_sessions(game: Game) -> None:
    """Check that sessions hold no more blocks in total than their share of the pool."""
    pool = game.engine.cache.pool
    most = max(1, int(game.config.max_session_share * pool.num_blocks))
    game.num_held_blocks = max(game.num_held_blocks, len(pool.sessions._holders))
    assert len(pool.sessions._holders) <= most


# How a request may end, and what its client must have been reported by then.

AT_THE_DOOR = (
    FailureReason.PROMPT_TOO_LONG,
    FailureReason.EXCEEDS_KV_CACHE,
    FailureReason.TENANT_OVER_QUOTA,
    FailureReason.QUEUE_FULL,
)

FOR_LACK_OF_TIME = (
    FailureReason.TTFT_DEADLINE_EXCEEDED,
    FailureReason.DEADLINE_EXCEEDED,
    FailureReason.TTFT_DEADLINE_UNREACHABLE,
    FailureReason.DEADLINE_UNREACHABLE,
)


def check_queued(game: Game, told: Told, queued: Queued) -> None:
    """Check a Queued event: once, of the first output, and with possible numbers."""
    assert told.num_queued == 1
    assert told.spec.leader_key == 0
    assert told.num_admissions == 0
    assert 0 <= queued.num_ahead <= game.config.max_num_waiting
    assert is_duration(queued.estimated_queue_s)


def check_finish(game: Game, told: Told, end: Finished) -> None:
    """Check a COMPLETED output: cancelled as requested, timed out, or the whole reference."""
    stop_ids = told.spec.stop_ids
    is_stopped = told.reference[-1] in stop_ids
    if told.cancelled_as is not None:
        assert end.reason is told.cancelled_as
    elif end.reason is FinishReason.TIME_LIMIT:
        assert game.clock() >= told.spec.time_limit_s
    else:
        assert len(told.tokens) == len(told.reference)
        assert end.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert end.stop_id == (stop_ids[0] if is_stopped else -1)


def check_failure(game: Game, told: Told, end: Failed) -> None:
    """Check an ERROR: its reason holds, and its estimates are possible."""
    spec, now, reason = told.spec, game.clock(), end.reason
    info = game.executor.info
    assert all(map(is_duration, (end.estimate_s, end.deadline_s)))
    # Never, for one that no machine of this kind serves in time.
    assert is_duration(end.retry_after_s) or (
        end.retry_after_s == math.inf and reason in FOR_LACK_OF_TIME
    )
    match reason:
        case FailureReason.PROMPT_TOO_LONG:
            assert spec.max_total_tokens > info.max_seq_len
        case FailureReason.EXCEEDS_KV_CACHE:
            assert -(-(spec.max_total_tokens - 1) // info.block_size) > info.num_blocks
        case FailureReason.DEADLINE_EXCEEDED:
            assert now >= spec.deadline_s
        case FailureReason.TTFT_DEADLINE_EXCEEDED:
            assert now >= spec.ttft_deadline_s
            assert not told.tokens
        case FailureReason.EXECUTOR_REQUEST_FAILED:
            assert any(fault.kind is FaultKind.REQUEST_FAILS for fault in game.simulated.faults)
        case FailureReason.TENANT_OVER_QUOTA:
            assert game.config.max_num_waiting_per_tenant is not None
        case FailureReason.TTFT_DEADLINE_UNREACHABLE:
            assert not told.tokens
            _check_unreachable(game, told, end, spec.ttft_deadline_s)
        case FailureReason.DEADLINE_UNREACHABLE:
            _check_unreachable(game, told, end, spec.deadline_s)
        case _:
            assert reason is FailureReason.QUEUE_FULL, f"{reason.name} was never caused"
    if reason in AT_THE_DOOR:
        assert told.num_admissions == 0
        # At a full queue a waiting request may be displaced by another.
        assert told.num_queued == 0 or reason is FailureReason.QUEUE_FULL


def _check_unreachable(game: Game, told: Told, end: Failed, deadline_s: float) -> None:
    """Check a request that was refused or dropped for a deadline that is still to come."""
    spec = told.spec
    assert game.config.deadline_admission
    assert deadline_s != NO_TIME
    assert end.at_s < deadline_s
    # What runs is given up for a small chance alone.
    assert end.chance is not None or not told.is_running
    assert end.chance is None or (game.config.min_deadline_chance > 0.0 and 0.0 <= end.chance < 1.0)
    assert end.estimate_s is not None
    assert end.deadline_s is not None
    assert end.retry_after_s is not None
    assert math.isclose(end.deadline_s, deadline_s - spec.arrival_s, abs_tol=1e-6)
    assert end.estimate_s >= end.deadline_s - 1e-6


def check_history(game: Game) -> None:
    """Check at the end of the game that every request ended, and was reported queued before it
    ran.
    """
    queued = {told.spec.request_id for told in game.history if told.num_queued}
    for told in game.history:
        assert told.end is not None
        assert not told.num_admissions or told.spec.request_id in queued


def is_duration(seconds: float | None) -> bool:
    """Return whether it is None or a finite, non-negative number of seconds."""
    return seconds is None or (math.isfinite(seconds) and seconds >= 0.0)


# The order of admissions and preemptions, checked on the events of a turn.


def check_order(game: Game, events: StepEvents) -> None:
    """Check seniority (FCFS) or classes (FAIR), and admissions in a step that preempted.

    Call it before the events are taken.
    """
    preempted = {change.key for change in events.changes if isinstance(change, Preempted)}
    admitted = {change.key for change in events.changes if isinstance(change, Admitted)}
    if not (preempted or admitted):
        return
    # The other policy never preempts.
    assert not preempted or game.config.admission_policy is AdmissionPolicy.MAX_UTILIZATION
    if preempted and admitted:
        _check_yields(game, events)
    ended = {end.key for end in events.ends}
    live = {key: told for key, told in game.live.items() if key not in ended}
    running = {key for key, told in live.items() if told.is_running}
    _check_forms(live, running, preempted)
    if game.config.order is SchedulingOrder.FCFS:
        _check_seniority(game, events, live, running, preempted)
    else:
        _check_victims(game, live, running, preempted, admitted)
        _check_classes(game, live, admitted)
        _check_lines(game, live, running, admitted)


def _check_yields(game: Game, events: StepEvents) -> None:
    """Check that a step that preempted admits only requests to which other tenants yield.

    Their class is not lower than that of any request preempted before them.
    """
    assert game.config.order is SchedulingOrder.FAIR
    assert math.isfinite(game.config.yield_ratio)
    levels: list[int] = []
    for change in events.changes:
        if isinstance(change, Preempted):
            levels.append(game.told[change.key].level)
        elif isinstance(change, Admitted):
            assert _level(game, game.told[change.key]) >= max(levels, default=-math.inf)


def _level(game: Game, told: Told) -> float:
    """Return the highest class to which the request can have risen by now."""
    return told.spec.priority + (game.clock() - told.spec.arrival_s) / game.config.aging_s


def _check_forms(live: dict[int, Told], running: set[int], preempted: set[int]) -> None:
    """Check that constrained requests are preempted only when no other request is left."""
    if any(live[key].spec.constraint is not None for key in preempted & live.keys()):
        assert all(live[key].spec.constraint is not None for key in running - preempted)


def _check_seniority(
    game: Game,
    events: StepEvents,
    live: dict[int, Told],
    running: set[int],
    preempted: set[int],
) -> None:
    """Check that none is admitted before a senior that may run, or preempted before a junior."""
    for change in events.changes:
        told = game.told[change.key]
        if isinstance(change, Preempted):
            if told.spec.constraint is None:
                others = (live[key] for key in running - preempted)
                assert all(o.rank < told.rank for o in others if o.spec.constraint is None)
        elif isinstance(change, Admitted):
            # Outputs after the first may wait for their leader.
            waiting = [other for key, other in live.items() if key not in running]
            assert all(o.rank >= told.rank for o in waiting if not o.spec.leader_key)
            running.add(change.key)


def _check_victims(
    game: Game, live: dict[int, Told], running: set[int], preempted: set[int], admitted: set[int]
) -> None:
    """Check that none is preempted while a lower class runs on, except by tenant preemption.

    Tenant preemption favours a request of another tenant and of no lower class.
    """
    left = [live[key] for key in running - preempted]
    favoured = [game.told[key] for key in admitted]
    for told in (live[key] for key in preempted & live.keys()):
        if told.spec.constraint is not None:
            continue
        is_yielding = math.isfinite(game.config.yield_ratio) and any(
            one.spec.tenant != told.spec.tenant and _level(game, one) >= told.level
            for one in favoured
        )
        is_lowest = all(told.level <= o.level for o in left if o.spec.constraint is None)
        assert is_lowest or is_yielding


def _check_classes(game: Game, live: dict[int, Told], admitted: set[int]) -> None:
    """Check classes at admission: the priority, plus one for each `aging_s` waited."""
    for key in admitted & game.engine.requests.keys() & live.keys():
        told, slot = live[key], game.engine.requests[key].slot
        told.level = int(game.engine.arrays.level[slot])
        assert told.spec.priority <= told.level <= _level(game, told)


def _check_lines(game: Game, live: dict[int, Told], running: set[int], admitted: set[int]) -> None:
    """Check that preempted requests come before new ones of their class and tenant."""
    thrown_out = [
        told
        for key, told in live.items()
        if told.num_preemptions and key not in running and key not in admitted
    ]
    lines = {told.line for told in thrown_out}
    for told in (live[key] for key in admitted & live.keys()):
        assert told.num_preemptions or told.line not in lines


# The engine's reports of how requests waited and ran, compared with outside observations.

TOLERANCE_S = 1e-6


def check_waits(game: Game, events: StepEvents, num_launched_before: int) -> None:
    """Check every residency in this turn's events; call it before they are taken.

    `num_launched_before`: batches that were launched before this turn.
    """
    running = {key for key, told in game.live.items() if told.is_running}
    least = {key: told.num_passed_by for key, told in game.live.items()}
    for change in events.changes:
        told = game.told[change.key]
        if isinstance(change, Admitted):
            assert change.wait is not None
            assert change.wait.num_passed_by == told.num_passed_by
            _check_wait(game, told, change.wait, change.at_s)
            running.add(change.key)
            told.first_launch = num_launched_before
            for other in game.live.values():
                other.num_passed_by += (
                    other.spec.key not in running and other.sequence < told.sequence
                )
        elif isinstance(change, Preempted):
            assert change.stay is not None
            running.discard(change.key)
            _check_stay(game, told, change.stay, num_launched_before)
            told.waits_since_s, told.num_passed_by = change.at_s, 0
            least[change.key] = 0
    for end in events.ends:
        told = game.told[end.key]
        is_refused = isinstance(end, Failed) and not told.num_queued and _is_new(told, events)
        _check_end(game, told, end, is_running=end.key in running, is_refused=is_refused)
        if end.wait is not None:
            # When in this turn it ended is not reported.
            assert least[end.key] <= end.wait.num_passed_by <= told.num_passed_by


def _is_new(told: Told, events: StepEvents) -> bool:
    """Return whether the whole request had no event before or in this turn."""
    first_key = told.spec.leader_key or told.spec.key
    return told.is_refusable and all(change.key != first_key for change in events.changes)


def _check_end(
    game: Game, told: Told, end: Finished | Failed, *, is_running: bool, is_refused: bool
) -> None:
    assert (end.stay is not None) is is_running
    assert (end.wait is not None) is not (is_running or is_refused)
    if end.wait is not None:
        _check_wait(game, told, end.wait, end.at_s)
    if end.stay is not None:
        _check_stay(game, told, end.stay, len(game.executor.rows))


def _check_wait(game: Game, told: Told, wait: Wait, at_s: float) -> None:
    """Check that no part is negative, and that the sum is the whole wait."""
    parts = (wait.blocks_s, wait.slots_s, wait.token_budget_s, wait.fairness_s, wait.other_s)
    assert min(parts) >= 0.0
    assert abs(sum(parts) - (at_s - told.waits_since_s)) <= TOLERANCE_S
    assert game.config.order is SchedulingOrder.FAIR or not wait.fairness_s


def _check_stay(game: Game, told: Told, stay: Stay, num_launched: int) -> None:
    """Check that steps, chunks and sizes are those of the batches that contained the request."""
    key, batches = told.spec.key, game.executor.rows[:num_launched]
    own = [at for at in range(told.first_launch, len(batches)) if key in batches[at].ends]
    assert stay.num_steps == len(own)
    num_chunks, furthest = 0, 0
    for batch in (batches[at] for at in own):
        # Who was not answered is asked again: nothing new is computed.
        num_chunks += key in batch.prefilled and batch.ends[key] > furthest
        furthest = max(furthest, batch.ends[key])
    assert stay.num_chunks == num_chunks
    # A prompt may have stood in its slot without tokens in the end, for so long as was not
    # reported.
    lasts = range(own[-1], len(batches)) if own else (0,)
    told_sizes = (stay.min_batch_size, stay.max_batch_size)
    assert told_sizes in {_sizes(game, own, last) for last in lasts}


def _sizes(game: Game, own: list[int], last: int) -> tuple[int, int]:
    """Return the smallest and largest batch with rows, from the first of `own` to `last`."""
    batches = game.executor.rows[own[0] : last + 1] if own else []
    sizes = [len(batch.ends) for batch in batches if batch.ends]
    return min(sizes, default=0), max(sizes, default=0)


# Who may be reported that a deadline is out of reach: judged by letting them run.

MAX_TURNS = 200
ROUNDING_S = 1e-6
UNREACHABLE = (FailureReason.TTFT_DEADLINE_UNREACHABLE, FailureReason.DEADLINE_UNREACHABLE)


def check_refused_alone(game: Game, told: Told, end: Failed) -> None:
    """Check, with exact prices, that a request alone in the engine is refused only if it would be
    late.
    """
    if end.reason not in UNREACHABLE or not told.was_alone or end.chance is not None:
        return
    # A second output of the request is company.
    is_company = any(
        one is not told and one.spec.request_id == told.spec.request_id for one in game.history
    )
    if is_company or end.at_s > told.spec.arrival_s:
        return
    assert is_late_alone(game, told), "refused, but alone it is in time"


def check_never(game: Game, told: Told, end: Failed) -> None:
    """Check, with exact prices, that only a request that would be late alone gets an infinite
    delay.
    """
    is_certain = end.chance is None
    if is_certain and end.retry_after_s == math.inf and not told.num_admissions:
        assert is_late_alone(game, told), "told never to come back, but alone it is in time"


def is_late_alone(game: Game, told: Told) -> bool:
    """Return whether the request alone would miss a deadline; True where that is unknown."""
    # Prefill under a target may be slower than it could.
    if not game.knows_prices or game.config.target_itl_s is not None:
        return True
    spec = told.spec
    first_s, last_s = run_alone(game, spec)
    return first_s >= spec.ttft_deadline_s - ROUNDING_S or last_s >= spec.deadline_s - ROUNDING_S


def run_alone(game: Game, spec: RequestSpec) -> tuple[float, float]:
    """Run the request alone to its last token; return the times of its first and last, engine
    clock.
    """
    clock = VirtualClock(spec.arrival_s)
    info = game.executor.info
    executor = SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            max_seq_len=info.max_seq_len,
            pipeline_depth=info.pipeline_depth,
            simulated=replace(game.simulated, faults=()),
        ),
        pacer=clock,
    )
    config = replace(game.config, deadline_admission=False)
    engine = Engine(executor, config, clock)
    timeless = replace(spec, ttft_deadline_s=NO_TIME, deadline_s=NO_TIME, time_limit_s=NO_TIME)
    engine.submit((timeless,))
    first_s = NO_TIME
    for _ in range(MAX_TURNS):
        if not engine.has_work:
            break
        events = engine.step()
        if len(events.tokens):
            first_s = min(first_s, events.at_s)
    last_s = clock()
    engine.close()
    return first_s, last_s
