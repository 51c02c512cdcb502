"""Who asked is told of every step once its result is in."""

from __future__ import annotations

import math

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import WaitReason
from penstock.scheduler.step_note import StepNote
from support.core import FakeClock, NullExecutor, make_info, make_spec, run_until_idle
from support.self_paced import SelfPacedExecutor

PRICES = CostModel(step_s=1.0, prefill_token_s=0.5, decode_slot_s=0.25, context_token_s=0.0)


class TickingClock(FakeClock):
    """A second passes each time that it is asked."""

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def noted(
    *, depth: int = 1, prices: CostModel | None = None, clock: FakeClock | None = None
) -> tuple[Engine, list[StepNote], NullExecutor]:
    notes: list[StepNote] = []
    executor = NullExecutor(make_info(pipeline_depth=depth, max_num_seqs=2))
    config = SchedulerConfig(max_num_batched_tokens=8, known_prices=prices)
    engine = Engine(executor, config, clock or FakeClock(), on_step=notes.append)
    return engine, notes, executor


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_with_rows_is_told_once_and_in_order(depth: int) -> None:
    engine, notes, executor = noted(depth=depth)
    for key in (1, 2, 3):
        engine.submit((make_spec(key, 10, max_tokens=4),))
    run_until_idle(engine)
    assert [note.batch for note in notes] == executor.batches
    assert all(note.batch.num_rows for note in notes)


def test_a_note_has_the_counts_of_its_moment_and_the_reason_of_its_plan() -> None:
    engine, notes, _ = noted()
    for key in (1, 2, 3):
        engine.submit((make_spec(key, 3, max_tokens=2),))
    engine.step()
    pool = engine.scheduler.life.cache.pool
    (note,) = notes
    assert note.waits_for is WaitReason.SLOTS
    assert (note.num_running, note.num_waiting, note.num_waiting_tokens) == (2, 1, 3)
    assert note.num_used_blocks == 2
    assert note.num_cached_blocks == 0
    assert note.num_used_blocks + note.num_cached_blocks + note.num_free_blocks == pool.num_blocks
    run_until_idle(engine)
    assert notes[-1].waits_for is None
    assert (notes[-1].num_running, notes[-1].num_waiting) == (0, 0)


def test_with_two_steps_under_way_the_reason_is_that_of_the_step() -> None:
    engine, notes, _ = noted(depth=2)
    engine.submit((make_spec(1, 3, max_tokens=9),))
    engine.step()
    assert not notes
    for key in (2, 3):
        engine.submit((make_spec(key, 3, max_tokens=9),))
    engine.step()
    engine.step()
    assert [note.waits_for for note in notes] == [None, WaitReason.SLOTS]


def test_times_follow_each_other() -> None:
    engine, notes, _ = noted(clock=TickingClock())
    engine.submit((make_spec(1, 3, max_tokens=3),))
    run_until_idle(engine)
    for note in notes:
        assert note.begun_s < note.launched_s < note.collected_s < note.updated_s


def test_a_step_is_predicted_by_the_prices_known_before_it() -> None:
    engine, notes, _ = noted(prices=PRICES, clock=TickingClock())
    engine.submit((make_spec(1, 3, max_tokens=60),))
    run_until_idle(engine)
    pace = engine.scheduler.life.outlook.pace
    assert pace.has_prices
    assert math.isnan(notes[0].predicted_s)
    known = [note.predicted_s for note in notes if not math.isnan(note.predicted_s)]
    assert 0 < len(known) < len(notes)
    lasted_s = notes[-1].collected_s - max(notes[-1].begun_s, notes[-2].collected_s)
    assert known[-1] == pytest.approx(lasted_s, rel=0.25)


def test_of_a_self_paced_executor_each_turn_with_rows_is_one() -> None:
    notes: list[StepNote] = []
    info = make_info()
    executor = SelfPacedExecutor(
        type(info)(
            name="self-paced",
            vocab_size=1000,
            block_size=4,
            num_blocks=64,
            max_seq_len=64,
            max_num_seqs=8,
            is_self_paced=True,
        )
    )
    engine = Engine(
        executor, SchedulerConfig(max_num_batched_tokens=16), FakeClock(), on_step=notes.append
    )
    engine.submit((make_spec(1, 6, max_tokens=2),))
    engine.step()
    assert not notes
    executor.say(1)
    engine.step()
    executor.say(1)
    engine.step()
    engine.step()
    assert [note.batch for note in notes] == [b for b in executor.batches if b.num_rows]
    assert [note.num_running for note in notes] == [1, 0]
    assert all(math.isnan(note.predicted_s) for note in notes)
    engine.close()


def test_nobody_asked_nobody_is_told() -> None:
    executor = NullExecutor(make_info())
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=8), FakeClock())
    engine.submit((make_spec(1, 3, max_tokens=2),))
    run_until_idle(engine)
    assert engine._watch is None
