"""Each invariant of the engine is violated on purpose, and the games detect it.

`SABOTAGES` is the table of the invariants: its first column is the invariant, its second the
assertion of the games that checks it, the third what breaks it. A law that no broken engine
violates checks nothing.

Not here: the bounds of fair shares, ageing and step sizing, which test_fairness.py and
test_pacing_laws.py check directly.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.scheduler import deadline_predictor
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
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.transitions import Transitions
from penstock.scheduler.victims import VictimSelection
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue
from support.game_runs import played

NUM_GAMES = 200


@dataclass(frozen=True, slots=True)
class Sabotage:
    """`told`: the message of the failure. `place`, `name`: replaced by `broken(original)`."""

    law: str
    told: str
    place: Any
    name: str
    broken: Callable[[Any], Any]


def without(original: Any) -> Any:
    """Replace it with a no-op."""
    return lambda *_, **__: None


def releasing_too_little(original: Any) -> Any:
    return lambda pool, blocks, *rest, **named: original(pool, blocks[1:], *rest, **named)


def matching_all(original: Any) -> Any:
    return lambda cache, request: cache.pool.match(request.block_hashes)


def twice_ended(original: Any) -> Any:
    def end(transitions: Transitions, *arguments: Any, **named: Any) -> None:
        original(transitions, *arguments, **named)
        ends = transitions._events.ends
        ends.append(ends[-1])

    return end


def losing_a_token(original: Any) -> Any:
    def preempt(transitions: Transitions, request: Any, now: float) -> None:
        transitions._arrays.num_tokens[request.slot] -= 1
        original(transitions, request, now)

    return preempt


def forgetting_flights(original: Any) -> Any:
    return lambda launched, slot, num_computed: num_computed


def three_more(original: Any) -> Any:
    return lambda *arguments: original(*arguments) + 3


def with_a_token_more(original: Any) -> Any:
    def remove(queue: WaitingQueue, request: Request) -> None:
        original(queue, request)
        queue.num_tokens += 1

    return remove


def misnaming(original: Any) -> Any:
    """Register the content of one block more than was computed."""
    return lambda cache, request, num: original(cache, request, num + cache.block_size)


def queued_twice(original: Any) -> Any:
    def submit(engine: Engine, *arguments: Any) -> None:
        original(engine, *arguments)
        changes = engine.events.changes
        if changes and isinstance(changes[-1], Queued):
            changes.append(changes[-1])

    return submit


def never_queued(original: Any) -> Any:
    def submit(engine: Engine, *arguments: Any) -> None:
        original(engine, *arguments)
        changes = engine.events.changes
        changes[:] = [change for change in changes if not isinstance(change, Queued)]

    return submit


def untold(original: Any) -> Any:
    return lambda *arguments: replace(original(*arguments), estimate_s=None)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *_, **__: value


def pessimistic(original: Any) -> Any:
    """Predict far longer steps than the real ones."""

    def machine(judge: DeadlinePredictor) -> Any:
        true = original(judge)
        return replace(true, prices=CostModel(step_s=5.0 * true.prices.step_s))

    return machine


def highest(original: Any) -> Any:
    def choose(victims: VictimSelection, spared: set[int], *_: Any) -> Any:
        candidates = [request for request in victims._running if request.slot not in spared]
        return max(candidates, key=lambda request: int(victims._arrays.level[request.slot]))

    return choose


def unowned(original: Any) -> Any:
    """Do not record a preemption."""

    def preempt(at_fault: Any, *arguments: Any) -> None:
        original(at_fault, *arguments)
        at_fault._has_preempted = False

    return preempt


def stingy(original: Any) -> Any:
    """Reserve what is needed now, not what may be needed."""
    return lambda admissions, request: len(request.tokens)


def as_fresh(original: Any) -> Any:
    """Forget which requests were preempted."""

    def push(order: FairOrder, request: Request) -> None:
        count, request.num_preemptions = request.num_preemptions, 0
        original(order, request)
        request.num_preemptions = count

    return push


def too_early(original: Any) -> Any:
    return lambda clock, request, now: original(clock, request, now - 1.0)


SABOTAGES = [
    # Blocks.
    Sabotage("free + cached + used = all", "", BlockPool, "release", releasing_too_little),
    Sabotage("reference counts add up", "reference counts", BlockPool, "share", without),
    Sabotage("no block is writable by two", "", KVCache, "match", matching_all),
    Sabotage("who ended holds no blocks", "", KVCache, "free", without),
    Sabotage(
        "what is read is what belongs there", "reads position", KVCache, "register", misnaming
    ),
    # Places.
    Sabotage("who runs is in the arrays", "", Transitions, "_remove", without),
    Sabotage("the queue counts tokens", "miscounts", WaitingQueue, "_remove", with_a_token_more),
    Sabotage("prefixes are counted", "live prefixes", LivePrefixes, "remove", without),
    Sabotage("tenants are counted", "miscounted", Tenants, "stop", always(False)),
    Sabotage("tenants run no more than they may", "", Tenants, "is_at_limit", always(False)),
    Sabotage("the queue is bounded", "_check_bounds", AdmissionControl, "_displaced", always(())),
    # What clients are reported.
    Sabotage("one end each", "take", Transitions, "fail", twice_ended),
    Sabotage("no token after the end", "", LaunchedSteps, "drop", forgetting_flights),
    Sabotage("output is the reference", "", Transitions, "preempt", losing_a_token),
    Sabotage("queued once", "check_queued", Engine, "submit_at", queued_twice),
    Sabotage("queued at all", "check_history", Engine, "submit_at", never_queued),
    Sabotage(
        "a refusal is told what is likely", "_check_unreachable", DeadlinePredictor, "_late", untold
    ),
    # Time.
    Sabotage("who is late ends", "turn", WaitingQueue, "due", always([])),
    Sabotage("nobody is overslept", "_check_wakeup", Transitions, "next_expiry_s", always(NO_TIME)),
    Sabotage(
        "in time alone, not refused",
        "alone it is in time",
        DeadlinePredictor,
        "_machine",
        pessimistic,
    ),
    Sabotage("never is never", "check_never", deadline_predictor, "retry_after_s", always(NO_TIME)),
    # Explanations.
    Sabotage("who passed is counted", "check_waits", WaitClock, "_note_passed", without),
    Sabotage("the reasons add up to the wait", "_check_wait", WaitClock, "join", too_early),
    Sabotage("steps are counted", "_check_stay", Residencies, "start_decoding", without),
    # Order.
    Sabotage("the budget holds", "launch", StepSizing, "budget", three_more),
    Sabotage(
        "lowest class is thrown out", "_check_victims", VictimSelection, "choose_victim", highest
    ),
    Sabotage("nobody new after a preemption", "_check_yields", Planner, "_preempt", unowned),
    Sabotage("who is in stays in", "check_order", BatchAdmission, "_reserve_tokens", stingy),
    Sabotage(
        "passing is bounded", "note_admission", BatchAdmission, "_may_be_passed", always(True)
    ),
    Sabotage("the thrown out come first", "_check_lines", FairOrder, "push", as_fresh),
]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.law)
def test_a_broken_engine_is_noticed(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(sabotage.place, sabotage.name)
    monkeypatch.setattr(sabotage.place, sabotage.name, sabotage.broken(original))

    for seed in range(NUM_GAMES):
        if (failure := failure_of(seed)) is not None and sabotage.told in failure:
            return

    raise AssertionError(f"{NUM_GAMES} games, and nobody noticed")


def failure_of(seed: int) -> str | None:
    """Return which check fails in the game of a seed, and its message."""
    try:
        played(seed)
    # Whatever goes wrong in a game is its result.
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {place.name}: {str(error) or place.line}"
    return None
