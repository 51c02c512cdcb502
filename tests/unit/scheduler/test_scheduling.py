"""Which request runs in which step. The tests cover the token budget, chunks, the order of
requests, the reuse of prefixes, several outputs of one request, preemption, and pipeline depths.
"""

import itertools

import numpy as np
import pytest

from penstock.scheduler.batch import Batch
from penstock.scheduler.config import AdmissionPolicy
from penstock.scheduler.events import Admitted, Completed, Preempted, Residency
from penstock.scheduler.request import FinishReason, SamplingParams
from support.core import (
    changed,
    ends,
    make_engine,
    make_spec,
    outputs,
    run_until_idle,
)


def scheduled_tokens(batch: Batch) -> dict[int, tuple[int, int]]:
    """Return, by slot, the position of the first token in this step and the number of tokens."""
    rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.num_tokens.tolist(), strict=True)
    return {slot: (start, count) for slot, start, count in rows}


def test_one_request_prefills_then_decodes_one_token_a_step() -> None:
    engine, executor = make_engine()
    engine.submit((make_spec(1, 5, max_tokens=3),))
    reported = run_until_idle(engine)
    assert [scheduled_tokens(batch) for batch in executor.batches] == [
        {0: (0, 5)},
        {0: (5, 1)},
        {0: (6, 1)},
    ]
    assert [batch.num_decodes for batch in executor.batches] == [0, 1, 1]
    assert outputs(reported) == {1: [7, 7, 7]}
    residency = Residency(num_chunks=1, num_steps=3, min_batch_size=1, max_batch_size=1)
    assert ends(reported) == {
        1: Completed(key=1, at_s=0.0, reason=FinishReason.LENGTH, residency=residency)
    }


def test_long_prompts_are_chunked_to_the_budget_and_decodes_go_first() -> None:
    engine, executor = make_engine(max_num_batched_tokens=8)
    engine.submit((make_spec(1, 2, max_tokens=5),))
    engine.step()
    engine.submit((make_spec(2, 20, max_tokens=1),))
    reported = run_until_idle(engine)
    assert [scheduled_tokens(batch) for batch in executor.batches[1:4]] == [
        {0: (2, 1), 1: (0, 7)},
        {0: (3, 1), 1: (7, 7)},
        {0: (4, 1), 1: (14, 6)},
    ]
    assert all(int(batch.num_tokens.sum()) <= 8 for batch in executor.batches)
    assert executor.batches[1].sampled_slots.tolist() == [0], "an unfinished prompt samples nothing"
    assert executor.batches[3].sampled_slots.tolist() == [0, 1]
    assert outputs(reported)[2] == [7]


def test_requests_join_and_leave_between_steps() -> None:
    engine, executor = make_engine()
    engine.submit((make_spec(1, 3, max_tokens=6),))
    engine.step()
    engine.submit((make_spec(2, 3, max_tokens=2),))
    run_until_idle(engine)
    assert [sorted(scheduled_tokens(batch)) for batch in executor.batches] == [
        [0],
        [0, 1],
        [0, 1],
        [0],
        [0],
        [0],
    ]
    assert [batch.released for batch in executor.batches] == [(), (), (), (1,), (), ()]
    joined = [[r.spec.key for r in batch.admitted] for batch in executor.batches]
    assert joined == [[1], [2], [], [], [], []]


def test_higher_classes_are_first_and_arrival_orders_within_a_class() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for key, priority in [(1, 0), (2, 0), (3, 9), (4, 9)]:
        engine.submit((make_spec(key, priority=priority),))
    assert changed(run_until_idle(engine), Admitted) == [3, 4, 1, 2]


def test_stop_ids_end_the_output_once_min_tokens_are_out() -> None:
    engine, _ = make_engine(token=lambda _slot, position: position)
    engine.submit((make_spec(1, 3, max_tokens=9, stop_ids=(5, 3)),))
    engine.submit((make_spec(2, 3, max_tokens=9, stop_ids=(3, 4, 5), min_tokens=2),))
    engine.submit((make_spec(3, 3, max_tokens=9),))
    reported = run_until_idle(engine)
    assert outputs(reported) == {1: [3], 2: [3, 4, 5], 3: [3, 4, 5, 6, 7, 8, 9, 10, 11]}
    how = {key: (end.reason, getattr(end, "stop_id", None)) for key, end in ends(reported).items()}
    assert how == {
        1: (FinishReason.STOP, 3),
        2: (FinishReason.STOP, 5),
        3: (FinishReason.LENGTH, -1),
    }


def test_a_known_prefix_is_not_computed_again() -> None:
    engine, executor = make_engine()
    prompt = list(range(500, 511))
    engine.submit((make_spec(1, prompt, max_tokens=2),))
    run_until_idle(engine)
    executor.batches.clear()
    engine.submit((make_spec(2, [*prompt[:9], 1, 2], max_tokens=1),))
    engine.submit((make_spec(3, prompt, max_tokens=1, hashed=False),))
    reported = run_until_idle(engine)
    cached = {
        c.key: c.num_cached_tokens for e in reported for c in e.changes if isinstance(c, Admitted)
    }
    assert cached == {2: 8, 3: 0}
    assert scheduled_tokens(executor.batches[0]) == {0: (8, 3), 1: (0, 11)}


def test_the_last_token_of_a_fully_known_prompt_is_computed_all_the_same() -> None:
    engine, executor = make_engine()
    prompt = list(range(500, 508))
    for key in (1, 2):
        engine.submit((make_spec(key, prompt, max_tokens=1),))
        run_until_idle(engine)
    assert scheduled_tokens(executor.batches[1]) == {0: (4, 4)}


def test_output_is_reused_by_the_next_turn() -> None:
    engine, executor = make_engine(token=lambda _slot, position: position)
    engine.submit((make_spec(1, [50, 51, 52], max_tokens=6),))
    run_until_idle(engine)
    executor.batches.clear()
    engine.submit((make_spec(2, [50, 51, 52, 3, 4, 5, 6, 7, 8, 99], max_tokens=1),))
    run_until_idle(engine)
    assert scheduled_tokens(executor.batches[0]) == {0: (8, 2)}


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    engine, executor = make_engine()
    prompt = list(range(500, 509))
    engine.submit((make_spec(1, prompt, max_tokens=1),))
    run_until_idle(engine)
    asks = SamplingParams(num_prompt_logprobs=0)
    engine.submit((make_spec(2, prompt, max_tokens=1, sampling=asks),))
    run_until_idle(engine)
    assert scheduled_tokens(executor.batches[1]) == {0: (0, 9)}


def test_siblings_wait_for_the_leaders_prompt_and_share_its_blocks() -> None:
    engine, executor = make_engine(max_num_batched_tokens=8)
    prompt = list(range(500, 514))
    leader = make_spec(1, prompt, request_id="r", max_tokens=5)
    followers = [make_spec(key, prompt, request_id="r", leader_key=1) for key in (2, 3)]
    engine.submit((leader, *followers))
    engine.submit((make_spec(4, 2, max_tokens=9),))
    engine.step()
    assert scheduled_tokens(executor.batches[0]) == {0: (0, 6), 1: (0, 2)}, (
        "nobody waits behind a sibling"
    )
    engine.step()
    assert scheduled_tokens(executor.batches[1]) == {0: (6, 7), 1: (2, 1)}
    engine.step()
    assert scheduled_tokens(executor.batches[2]) == {0: (13, 1), 1: (3, 1)}
    engine.step()
    table = executor.batches[3].arrays.block_table
    rows = scheduled_tokens(executor.batches[3])
    siblings = [slot for slot in rows if slot > 1]
    assert [rows[slot] for slot in siblings] == [(12, 2), (12, 2)]
    for slot in siblings:
        assert table[slot, :3].tolist() == table[0, :3].tolist()
    assert set(ends(run_until_idle(engine))) == {1, 2, 3, 4}


def test_another_output_computes_the_prompt_if_the_leader_is_cancelled() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    specs = tuple(
        make_spec(key, list(range(20)), request_id="r", leader_key=0 if key == 1 else 1)
        for key in (1, 2, 3)
    )
    engine.submit(specs)
    engine.step()
    assert engine.cancel(1)
    reported = run_until_idle(engine)
    assert {key: len(tokens) for key, tokens in outputs(reported).items()} == {2: 4, 3: 4}


def test_outputs_are_the_same_at_every_pipeline_depth() -> None:
    results = []
    for depth in (1, 2):
        engine, executor = make_engine(
            token=lambda _s, position: position, pipeline_depth=depth, max_num_seqs=3
        )
        for key in range(1, 8):
            engine.submit((make_spec(key, key + 2, max_tokens=3 + key % 3, stop_ids=(8,)),))
        results.append(outputs(run_until_idle(engine)))
        assert not executor.results, "a launched step was never collected"
    assert results[0] == results[1]


def test_with_two_steps_in_flight_late_tokens_of_the_ended_are_dropped() -> None:
    engine, executor = make_engine(pipeline_depth=2, max_num_seqs=1)
    engine.submit((make_spec(1, 3, max_tokens=9, stop_ids=(7,)),))
    engine.submit((make_spec(2, 3, max_tokens=2),))
    reported = run_until_idle(engine)
    assert outputs(reported) == {1: [7], 2: [7, 7]}
    # The second step of request 1 was under way when the first one ended it.
    assert [batch.num_decodes for batch in executor.batches] == [0, 1, 0, 1]
    assert executor.batches[2].released == (0,)


def test_no_step_is_launched_beyond_the_last_token() -> None:
    engine, executor = make_engine(pipeline_depth=2)
    engine.submit((make_spec(1, 3, max_tokens=3),))
    run_until_idle(engine)
    assert len(executor.batches) == 3


def test_a_replayed_request_continues_where_it_was() -> None:
    engine, executor = make_engine(token=lambda _slot, position: position)
    engine.submit((make_spec(1, [50, 51, 2, 3], num_replayed=2, max_tokens=4),))
    reported = run_until_idle(engine)
    assert outputs(reported) == {1: [4, 5]}
    assert int(executor.batches[0].arrays.num_prompt[0]) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_recomputes_and_continues(depth: int) -> None:
    engine, executor = make_engine(
        token=lambda _slot, position: position,
        num_blocks=4,
        max_num_seqs=4,
        pipeline_depth=depth,
        watermark=0.0,
    )
    for key in (1, 2):
        engine.submit((make_spec(key, [key * 10, 1, 2], max_tokens=11),))
    reported = run_until_idle(engine)
    assert changed(reported, Preempted) == [2], "the junior goes"
    expected = list(range(3, 14))
    assert outputs(reported) == {1: expected, 2: expected}
    assert list(ends(reported)) == [1, 2]
    for before, after in itertools.pairwise(reported):
        if any(isinstance(change, Preempted) for change in after.changes):
            assert not any(isinstance(change, Admitted) for change in after.changes)
        assert before.step <= after.step
    assert any(int(batch.num_tokens.max()) > 3 for batch in executor.batches[1:]), "recomputed"


def test_a_preempted_request_keeps_its_seniority() -> None:
    engine, _ = make_engine(num_blocks=4, max_num_seqs=2, watermark=0.0)
    for key in (1, 2, 3):
        engine.submit((make_spec(key, 3, max_tokens=11),))
    reported = run_until_idle(engine)
    assert changed(reported, Preempted)[0] == 2
    order = changed(reported, Admitted)
    assert order.count(2) > 1
    assert order.index(3) > max(i for i, key in enumerate(order) if key == 2), "3 overtook 2"


def test_a_reservation_to_the_end_never_preempts() -> None:
    engine, executor = make_engine(
        num_blocks=8, max_num_seqs=8, admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT
    )
    for key in range(1, 7):
        engine.submit((make_spec(key, 3, max_tokens=10),))
    reported = run_until_idle(engine)
    assert not changed(reported, Preempted)
    assert max(batch.num_rows for batch in executor.batches) == 2
    assert len(ends(reported)) == 6


def test_admission_leaves_a_watermark_unless_the_engine_is_idle() -> None:
    engine, executor = make_engine(
        num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, watermark=0.25
    )
    engine.submit((make_spec(1, 44, max_tokens=1),))
    engine.submit((make_spec(2, 8, max_tokens=1),))
    engine.step()
    assert sorted(scheduled_tokens(executor.batches[0])) == [0], (
        "11 + 2 blocks of 16 leave less than 4"
    )
    engine.submit((make_spec(3, 60, max_tokens=1),))
    reported = run_until_idle(engine)
    assert set(ends(reported)) == {2, 3}, "alone, a request may take all"


def test_rows_of_a_batch_share_the_arrays_without_copying() -> None:
    engine, executor = make_engine()
    engine.submit((make_spec(1, [11, 12, 13], max_tokens=2),))
    engine.step()
    arrays = executor.batches[0].arrays
    assert arrays is engine.arrays
    assert arrays.token_ids[0, :4].tolist() == [11, 12, 13, 7]
    assert arrays.num_tokens.dtype == np.int32
