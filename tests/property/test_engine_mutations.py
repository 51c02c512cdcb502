"""Each invariant of the engine is violated on purpose, and the engine machine must detect it.

`MUTATIONS` lists the invariants, each with a change of the engine that violates it. An invariant
that no such change violates would test nothing.

The bounds of fair shares, ageing and step sizing are not listed; test_fairness.py and
test_latency_target_invariants.py check them directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.scheduler import deadline_predictor
from penstock.scheduler.admission_blocks import AdmissionBlocks
from penstock.scheduler.admission_control import AdmissionControl
from penstock.scheduler.batch_admission import BatchAdmission
from penstock.scheduler.block_pool import BlockPool
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.deadline_predictor import DeadlinePredictor
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Queued
from penstock.scheduler.fair_order import FairOrder
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedSteps
from penstock.scheduler.live_prefixes import LivePrefixes
from penstock.scheduler.planner import Planner
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.running import Residencies
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.transitions import Transitions
from penstock.scheduler.victims import VictimSelection
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue
from property.engine_machine import EngineMachine


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of the engine that violates the invariant `law`.

    The function `broken` replaces the attribute `name` of `place`. It is called with the original
    attribute and the arguments of the call.
    """

    law: str
    place: Any
    name: str
    broken: Callable[..., Any]


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


without = always(None)


def releasing_too_little(
    release: Any, pool: BlockPool, blocks: Any, *rest: Any, **more: Any
) -> None:
    release(pool, blocks[1:], *rest, **more)


def matching_all(_: Any, cache: KVCache, request: Request) -> Any:
    return cache.pool.match(request.block_hashes)


def misnaming(register: Any, cache: KVCache, request: Request, num: int) -> None:
    """Register one block more than was computed."""
    register(cache, request, num + cache.block_size)


def twice_ended(fail: Any, transitions: Transitions, *arguments: Any, **more: Any) -> None:
    fail(transitions, *arguments, **more)
    transitions._events.ends.append(transitions._events.ends[-1])


def losing_a_token(preempt: Any, transitions: Transitions, request: Request, now: float) -> None:
    transitions._arrays.num_tokens[request.slot] -= 1
    preempt(transitions, request, now)


def forgetting_flights(_: Any, launched: LaunchedSteps, slot: int, num_computed: int) -> int:
    return num_computed


def three_more(budget: Any, *arguments: Any) -> Any:
    return budget(*arguments) + 3


def with_a_token_more(remove: Any, queue: WaitingQueue, request: Request) -> None:
    remove(queue, request)
    queue.num_tokens += 1


def queued_twice(submit: Any, engine: Engine, *arguments: Any) -> None:
    submit(engine, *arguments)
    changes = engine.events.changes
    if changes and isinstance(changes[-1], Queued):
        changes.append(changes[-1])


def never_queued(submit: Any, engine: Engine, *arguments: Any) -> None:
    submit(engine, *arguments)
    changes = engine.events.changes
    changes[:] = [change for change in changes if not isinstance(change, Queued)]


def without_estimate(late: Any, *arguments: Any) -> Any:
    return replace(late(*arguments), estimate_s=None)


def pessimistic(machine: Any, predictor: DeadlinePredictor) -> Any:
    """Predict steps much longer than the real ones."""
    true = machine(predictor)
    return replace(true, cost=CostModel(step_s=5.0 * true.cost.step_s))


def highest(_: Any, victims: VictimSelection, spared: set[int], *__: Any) -> Any:
    candidates = [request for request in victims._running if request.slot not in spared]
    return max(candidates, key=lambda request: int(victims._arrays.level[request.slot]))


def unowned(preempt: Any, planner: Planner, *arguments: Any) -> None:
    """Preempt, but do not record it in the planner."""
    preempt(planner, *arguments)
    planner._has_preempted = False


def stingy(_: Any, blocks: AdmissionBlocks, request: Request) -> int:
    """Reserve only the blocks needed now, not the blocks that may be needed later."""
    return len(request.tokens)


def as_fresh(push: Any, order: FairOrder, request: Request) -> None:
    """Queue a preempted request as if it were new."""
    count, request.num_preemptions = request.num_preemptions, 0
    push(order, request)
    request.num_preemptions = count


def too_early(join: Any, clock: WaitClock, request: Request, now: float) -> None:
    join(clock, request, now - 1.0)


MUTATIONS = [
    # Blocks.
    Mutation("free + cached + used = all", BlockPool, "release", releasing_too_little),
    Mutation("reference counts add up", BlockPool, "share", without),
    Mutation("no block is writable by two", KVCache, "match", matching_all),
    Mutation("who ended holds no blocks", KVCache, "free", without),
    Mutation("what is read is what belongs there", KVCache, "register", misnaming),
    # Places.
    Mutation("who runs is in the arrays", Transitions, "_remove", without),
    Mutation("the queue counts tokens", WaitingQueue, "_remove", with_a_token_more),
    Mutation("prefixes are counted", LivePrefixes, "remove", without),
    Mutation("tenants are counted", TenantCounters, "stop", always(False)),
    Mutation("tenants run no more than they may", TenantCounters, "is_at_limit", always(False)),
    Mutation("the queue is bounded", AdmissionControl, "_displaced", always(())),
    # What clients are reported.
    Mutation("one end each", Transitions, "fail", twice_ended),
    Mutation("no token after the end", LaunchedSteps, "drop", forgetting_flights),
    Mutation("output is the reference", Transitions, "preempt", losing_a_token),
    Mutation("queued once", Engine, "submit_at", queued_twice),
    Mutation("queued at all", Engine, "submit_at", never_queued),
    Mutation(
        "a rejection reports what is likely", DeadlinePredictor, "_late_rejection", without_estimate
    ),
    # Time.
    Mutation("who is late ends", WaitingQueue, "due", always([])),
    Mutation("nobody is overslept", Transitions, "next_expiry_s", always(NO_TIME)),
    Mutation("in time alone, not rejected", DeadlinePredictor, "_machine_model", pessimistic),
    Mutation("never is never", deadline_predictor, "retry_after_s", always(NO_TIME)),
    # Explanations.
    Mutation("who passed is counted", WaitClock, "_note_passed", without),
    Mutation("the reasons add up to the wait", WaitClock, "join", too_early),
    Mutation("steps are counted", Residencies, "start_decoding", without),
    # Order.
    Mutation("the budget holds", StepSizing, "budget", three_more),
    Mutation("lowest class is thrown out", VictimSelection, "choose_victim", highest),
    Mutation("nobody new after a preemption", Planner, "_preempt", unowned),
    Mutation("who is in stays in", AdmissionBlocks, "num_tokens", stingy),
    Mutation("passing is bounded", BatchAdmission, "_may_be_overtaken", always(True)),
    Mutation("the thrown out come first", FairOrder, "push", as_fresh),
]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.law)
def test_a_violated_invariant_is_detected(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(mutation.place, mutation.name)
    monkeypatch.setattr(
        mutation.place,
        mutation.name,
        lambda *all_, **more: mutation.broken(original, *all_, **more),
    )
    how = settings(
        max_examples=2000,
        stateful_step_count=60,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    try:
        run_state_machine_as_test(EngineMachine, settings=how)
    # Any exception shows that a check detected the change.
    except Exception:
        return
    raise AssertionError("no check failed")
