"""Who may be reported that a deadline is out of reach: judged by letting them run.

Owns the counterfactual, for what is certain: a chance that is too small may have come true all the
same. A request that had an engine to itself, one that knows the exact prices of
its device, was refused at submission: then a fresh engine that foresees nothing must indeed be late
with it. Likewise for one that was reported never to come back, a caller that else there was.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.pace import VirtualClock
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed
from penstock.scheduler.request import NO_TIME, FailureReason, RequestSpec
from support.game_records import Game, Told

MAX_TURNS = 200
ROUNDING_S = 1e-6
UNREACHABLE = (FailureReason.TTFT_DEADLINE_UNREACHABLE, FailureReason.DEADLINE_UNREACHABLE)


def check_refused_alone(game: Game, told: Told, end: Failed) -> None:
    """With exact prices and no client else in the engine, a caller that can be in time is not
    refused."""
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
    """With exact prices, only who would be late in a separate engine is reported never to
    return."""
    is_certain = end.chance is None
    if is_certain and end.retry_after_s == math.inf and not told.num_admissions:
        assert is_late_alone(game, told), "told never to come back, but alone it is in time"


def is_late_alone(game: Game, told: Told) -> bool:
    """Whether it would miss a deadline; also where nothing can be stated of that."""
    # Prefill under a target may be slower than it could.
    if not game.knows_prices or game.config.target_itl_s is not None:
        return True
    spec = told.spec
    first_s, last_s = run_alone(game, spec)
    return first_s >= spec.ttft_deadline_s - ROUNDING_S or last_s >= spec.deadline_s - ROUNDING_S


def run_alone(game: Game, spec: RequestSpec) -> tuple[float, float]:
    """When a request that nothing ends but its last token has its first and last, engine clock."""
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
