"""Listeners get a report of every step once its result has arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.scheduler.batch import Batch
from penstock.scheduler.cost_model import CostModel, measure_of
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import RequestSpec
from support.core import FakeClock, NullExecutor, make_engine, make_spec, run_until_idle
from support.self_paced import make_self_paced


class Notes:
    """A listener that records the notes of steps, and all calls in order."""

    def __init__(self) -> None:
        self.notes: list[StepNote] = []
        self.reported: list[object] = []

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        self.reported.append(specs)

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        self.reported.append((batch, [chunk.count for chunk in chunks], launched_s))

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        self.reported.append(events)
        if note is not None:
            self.notes.append(note)


COST = CostModel(step_s=1.0, prefill_token_s=0.5, decode_slot_s=0.25, context_token_s=0.0)


class TickingClock(FakeClock):
    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def noted(**settings: Any) -> tuple[Engine, list[StepNote], NullExecutor]:
    listener = Notes()
    engine, executor = make_engine(
        listener=listener, **{"max_num_seqs": 2, "max_num_batched_tokens": 8, **settings}
    )
    return engine, listener.notes, executor


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_with_rows_is_reported_once_and_in_order(depth: int) -> None:
    engine, notes, executor = noted(pipeline_depth=depth)
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
    pool = engine.cache.pool
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
    engine, notes, _ = noted(pipeline_depth=2)
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


def test_what_an_executor_computes_at_its_launch_is_its_own_time() -> None:
    engine, notes, executor = noted(clock=(clock := TickingClock()))
    launch = executor.launch

    def slow(batch: Batch) -> None:
        clock.now_s += 100.0
        launch(batch)

    executor.launch = slow  # type: ignore[method-assign]  # it has no clock
    engine.submit((make_spec(1, 3, max_tokens=1),))
    run_until_idle(engine)
    (note,) = notes
    assert note.launched_s - note.begun_s == 1.0
    assert note.collected_s - note.launched_s > 100.0


def test_a_listener_is_notified_in_order() -> None:
    listener = Notes()
    engine, executor = make_engine(listener=listener)
    specs = (make_spec(1, 3, max_tokens=1),)
    engine.submit(specs)
    events = engine.step()
    assert listener.reported == [specs, (executor.batches[0], [3], 0.0), events]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_counts_of_a_note_equal_the_content_of_the_step(depth: int) -> None:
    """The engine computes the sums over decodes again only when the set of decodes changes."""
    engine, notes, _ = noted(pipeline_depth=depth, max_num_seqs=4, num_blocks=24, watermark=0.0)
    for key, (num_prompt, max_tokens) in enumerate([(5, 20), (23, 9), (3, 30), (17, 3)] * 3, 1):
        engine.submit((make_spec(key, num_prompt, max_tokens=max_tokens, hashed=False),))
    run_until_idle(engine)
    assert len(notes) > 40
    for note in notes:
        measure = measure_of(note.batch, 0.0)
        assert note.num_prefill_tokens == measure.num_prefill_tokens
        assert note.num_context_tokens == measure.num_context_tokens


def test_a_step_is_predicted_by_the_cost_known_before_it() -> None:
    engine, notes, _ = noted(known_cost=COST, clock=TickingClock())
    engine.submit((make_spec(1, 3, max_tokens=60),))
    run_until_idle(engine)
    pace = engine.sizing
    assert pace.has_cost
    assert math.isnan(notes[0].predicted_s)
    known = [note.predicted_s for note in notes if not math.isnan(note.predicted_s)]
    assert 0 < len(known) < len(notes)
    lasted_s = notes[-1].collected_s - max(notes[-1].begun_s, notes[-2].collected_s)
    assert known[-1] == pytest.approx(lasted_s, rel=0.25)


def test_of_a_self_paced_executor_each_turn_with_rows_is_one() -> None:
    listener = Notes()
    notes = listener.notes
    engine, executor = make_self_paced(listener=listener)
    engine.submit((make_spec(1, 6, max_tokens=2),))
    engine.step()
    assert not notes
    executor.emit(1)
    engine.step()
    executor.emit(1)
    engine.step()
    engine.step()
    assert [note.batch for note in notes] == [b for b in executor.batches if b.num_rows]
    assert [note.num_running for note in notes] == [1, 0]
    assert all(math.isnan(note.predicted_s) for note in notes)
    engine.close()


def test_without_listeners_no_steps_are_recorded() -> None:
    engine, _ = make_engine()
    engine.submit((make_spec(1, 3, max_tokens=2),))
    run_until_idle(engine)
    assert engine._watch is None
