"""Measured step times of the engine set the limits of its next steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.batch import Batch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel, StepMeasure
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.step_sizing import StepSizing
from support.core import make_info, make_spec, simulated_executor

COST = CostModel(step_s=0.01, prefill_token_s=0.001, decode_slot_s=0.001, context_token_s=1e-5)


class Steps:
    """An `EngineListener` that records the content and duration of each step."""

    def __init__(self) -> None:
        self.measures: list[StepMeasure] = []
        self._ended_s = 0.0

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        pass

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        pass

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        if note is not None:
            begun_s = max(note.begun_s, self._ended_s)
            self._ended_s = note.collected_s
            self.measures.append(
                StepMeasure(
                    num_prefill_tokens=note.num_prefill_tokens,
                    num_decodes=note.batch.num_decodes,
                    num_context_tokens=note.num_context_tokens,
                    seconds=note.collected_s - begun_s,
                )
            )


def make_engine(
    steps: Steps, *, depth: int = 1, num_seqs: int = 32, **config: Any
) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock(5.0)
    executor = simulated_executor(
        clock, COST, num_blocks=4000, max_num_seqs=num_seqs, pipeline_depth=depth
    )
    settings = SchedulerConfig(max_num_batched_tokens=200, known_cost=COST)
    engine = Engine(executor, replace(settings, **config), clock, steps)
    return engine, clock


def run(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to rest")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_content_and_duration_of_every_step_are_measured(depth: int) -> None:
    steps = Steps()
    engine, clock = make_engine(steps, depth=depth)
    engine.submit((make_spec(1, list(range(20)), max_tokens=6, hashed=False),))
    engine.step()
    engine.submit((make_spec(2, list(range(12)), max_tokens=9, hashed=False),))
    run(engine)
    # Idle time belongs to no step.
    clock.advance(100.0)
    engine.submit((make_spec(3, list(range(12)), max_tokens=2, hashed=False),))
    run(engine)

    measures = steps.measures
    assert len(measures) >= 10
    assert measures[0].num_prefill_tokens == 20
    assert measures[0].num_context_tokens == 20
    assert sum(measure.num_prefill_tokens for measure in measures) == 44
    for measure in measures:
        expected_s = COST.step_time_s(
            num_prefill_tokens=measure.num_prefill_tokens,
            num_decodes=measure.num_decodes,
            num_context_tokens=measure.num_context_tokens,
        )
        assert measure.seconds == pytest.approx(expected_s)


def test_without_a_target_the_limits_are_the_fixed_ones() -> None:
    pace = StepSizing(make_info(max_num_seqs=8), SchedulerConfig(max_num_batched_tokens=100))

    assert pace.budget(6, 1000) == 94
    assert pace.max_num_running == 8
    assert pace.prefill_budget_tokens == 100


def test_with_a_target_prefill_gets_the_time_that_decodes_do_not_use() -> None:
    config = SchedulerConfig(max_num_batched_tokens=200, target_itl_s=0.06, known_cost=COST)
    pace = StepSizing(make_info(max_num_seqs=32, block_size=4), config)
    for _ in range(200):
        pace.learn(
            StepMeasure(num_prefill_tokens=10, num_decodes=10, num_context_tokens=0, seconds=0.03)
        )
        pace.learn(
            StepMeasure(num_prefill_tokens=0, num_decodes=10, num_context_tokens=0, seconds=0.02)
        )
    budgets = [pace.budget(20, 0) for _ in range(400)]

    # 60 ms less 10 ms less 20 decodes of a millisecond are 29 tokens of 1.01 ms, 28 in blocks.
    assert budgets[-1] == 28
    assert pace.budget(0, 0) == 200


def test_a_self_paced_executor_rejects_a_latency_target() -> None:
    info = replace(make_info(), is_self_paced=True)
    with pytest.raises(ValueError, match="target_itl_s"):
        StepSizing(info, SchedulerConfig(target_itl_s=0.05))
    assert not StepSizing(info, SchedulerConfig(known_cost=COST)).has_cost


def test_running_requests_keep_their_time_while_prompts_keep_coming() -> None:
    steps = Steps()
    measures = steps.measures
    engine, _ = make_engine(steps, target_itl_s=0.06)
    for key in range(1, 41):
        engine.submit((make_spec(key, [key] * 150, max_tokens=60, hashed=False),))
    run(engine)

    late = [measure for measure in measures[100:] if measure.num_decodes]
    assert len(late) > 100
    assert any(measure.num_prefill_tokens for measure in late)
    assert max(measure.seconds for measure in late) <= 0.06 * 1.01
    assert sum(measure.num_prefill_tokens for measure in measures) == 40 * 150


def test_the_batch_shrinks_to_what_the_target_allows() -> None:
    steps = Steps()
    measures = steps.measures
    # 10 ms and a millisecond for each running request: 32 are too many for 30 ms.
    engine, _ = make_engine(steps, target_itl_s=0.03)
    for key in range(1, 201):
        engine.submit((make_spec(key, [key] * 8, max_tokens=40, hashed=False),))
    run(engine)

    assert max(measure.num_decodes for measure in measures) == 32
    late = [measure.num_decodes for measure in measures[len(measures) // 2 :]]
    assert max(late) < 20
    assert len(engine.running) == 0
