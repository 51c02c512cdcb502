"""What is reported about a request's time in the running batch: the number of its chunks and steps,
and how many requests ran with it.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.events import Preempted, Residency
from penstock.scheduler.running import Residencies
from support.core import ends, make_engine, make_spec, run_until_idle
from support.self_paced import make_self_paced


def residency_of(key: int, reported: list) -> Residency | None:  # type: ignore[type-arg]  # of StepEvents
    return ends(reported)[key].residency


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_steps_and_the_sizes_of_batches(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth, max_num_seqs=4, max_num_batched_tokens=8)
    engine.submit((make_spec(1, 20, max_tokens=9),))
    engine.submit((make_spec(2, 4, max_tokens=1),))
    reported = run_until_idle(engine)
    # 8 + 8 + 4 tokens, the other's 4 next to the last; the last chunk brings the first token.
    assert residency_of(1, reported) == Residency(
        num_chunks=3, num_steps=11, min_batch_size=1, max_batch_size=2
    )
    assert residency_of(2, reported) == Residency(
        num_chunks=1, num_steps=1, min_batch_size=2, max_batch_size=2
    )


def test_a_residency_ends_with_a_preemption_and_another_begins() -> None:
    engine, _ = make_engine(
        num_blocks=6,
        max_seq_len=24,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        watermark=0.0,
        deadline_admission=False,
    )
    for key in (1, 2):
        engine.submit((make_spec(key, 8, max_tokens=14, hashed=False),))
    reported = run_until_idle(engine)
    (preempted,) = [
        change for events in reported for change in events.changes if isinstance(change, Preempted)
    ]
    # Both have 12 tokens when a fourth block is wanted.
    assert preempted.residency == Residency(
        num_chunks=1, num_steps=5, min_batch_size=2, max_batch_size=2
    )
    # 13 tokens are computed again and bring one; eight are left to decode.
    assert residency_of(2, reported) == Residency(
        num_chunks=1, num_steps=9, min_batch_size=1, max_batch_size=1
    )


def test_a_prompt_that_is_not_answered_is_one_chunk() -> None:
    engine, executor = make_self_paced()
    engine.submit((make_spec(1, 6, max_tokens=3),))
    for _ in range(4):
        engine.step()
    executor.emit(1, 3)
    reported = [engine.step()]
    assert residency_of(1, reported) == Residency(
        num_chunks=1, num_steps=4, min_batch_size=1, max_batch_size=1
    )
    engine.close()


def test_a_request_that_is_asked_again_took_a_step_more() -> None:
    residencies = Residencies(1)
    residencies.begin(0)
    residencies.note_step(1, ())
    residencies.start_decoding(0)
    residencies.note_step(1, ())
    residencies.return_to_prefill(0)
    residencies.note_step(1, ())
    assert residencies.end(0) == Residency(
        num_chunks=0, num_steps=1, min_batch_size=1, max_batch_size=1
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data())
def test_the_sizes_are_those_since_it_began(sizes: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(sizes) - 1))
    residencies = Residencies(1)
    for step, size in enumerate([1 + size for size in sizes]):
        if step == first:
            residencies.begin(0)
            residencies.start_decoding(0)
        residencies.note_step(size, ())
    seen = [1 + size for size in sizes[first:]]
    assert residencies.end(0) == Residency(
        num_chunks=0, num_steps=len(seen), min_batch_size=min(seen), max_batch_size=max(seen)
    )
