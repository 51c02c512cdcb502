"""Scheduling over a self-paced executor, which forms its own batches: which requests run, and what
the engine does in steps without results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.scheduler.config import AdmissionPolicy
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed, PrefixFound
from penstock.scheduler.request import (
    FailureReason,
    FinishReason,
)
from support.core import FakeClock, ends, make_info, make_spec, outputs
from support.self_paced import SelfPacedExecutor, make_self_paced, token_of

Pair = tuple[Engine, SelfPacedExecutor]


@pytest.fixture
def pair() -> Iterator[Pair]:
    engine, executor = make_self_paced()
    yield engine, executor
    engine.close()


def tokens_from(key: int, start: int, count: int) -> list[int]:
    return [token_of(f"request-{key}", start + i) for i in range(count)]


def test_a_step_returns_at_once_with_or_without_results(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 5, max_tokens=3),))

    reported = [engine.step() for _ in range(3)]
    for _ in range(3):
        executor.emit(1)
        reported.append(engine.step())
        engine.check_integrity()

    assert outputs(reported) == {1: tokens_from(1, 5, 3)}
    assert ends(reported)[1].reason is FinishReason.LENGTH
    assert not engine.has_work


def test_a_prompt_is_handed_over_whole_and_planned_until_it_is_answered(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 40, max_tokens=2),))

    for _ in range(3):
        engine.step()
        engine.check_integrity()

    batch = executor.batches[-1]
    assert batch.num_decodes == 0
    assert batch.num_tokens.tolist() == [40]
    assert batch.sampled_slots.tolist() == batch.slots.tolist()


def test_unanswered_prompts_weigh_on_the_budget(pair: Pair) -> None:
    engine, executor = pair
    for key in (1, 2, 3, 4, 5):
        engine.submit((make_spec(key, 10),))

    engine.step()
    engine.step()
    # Two steps of 16 tokens: the one that runs and the one that comes.
    assert executor.admitted == [1, 2, 3]

    executor.emit(1)
    engine.step()

    # Twice 16 less the one decode, and less the 20 tokens of two prompts.
    assert executor.admitted == [1, 2, 3, 4]


def test_a_prompt_beyond_the_budget_is_admitted_alone(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 4),))
    engine.submit((make_spec(2, 40),))
    engine.submit((make_spec(3, 4),))

    engine.step()
    assert executor.admitted == [1]
    executor.emit(1)
    engine.step()
    assert executor.admitted == [1, 2]
    executor.emit(2)
    engine.step()
    assert executor.admitted == [1, 2, 3]


def test_block_tables_grow_if_several_tokens_arrive_at_once(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 5, max_tokens=20),))
    engine.step()

    executor.emit(1, 13)
    reported = [engine.step()]
    engine.check_integrity()
    executor.emit(1, 30)
    reported.append(engine.step())
    engine.check_integrity()

    assert outputs(reported) == {1: tokens_from(1, 5, 20)}


def test_results_that_have_arrived_free_their_slots_in_the_same_step() -> None:
    engine, executor = make_self_paced(max_num_seqs=1)
    engine.submit((make_spec(1, 4, max_tokens=1),))
    engine.submit((make_spec(2, 4),))
    engine.step()
    executor.emit(1)

    engine.step()

    assert executor.admitted == [1, 2]
    engine.close()


def test_the_last_release_reaches_the_executor_and_leaves_no_work(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 4, max_tokens=1),))
    engine.step()
    executor.emit(1)

    engine.step()

    assert executor.in_engine == {}
    assert not engine.has_work


def test_a_prefix_counts_as_cached_once_it_was_answered(pair: Pair) -> None:
    engine, executor = pair
    prompt = list(range(9))
    engine.submit((make_spec(1, prompt),))
    engine.step()
    engine.submit((make_spec(2, prompt),))
    engine.step()
    # Not computed yet: nothing to share, though it runs.
    assert executor.batches[-1].starts.tolist() == [0] * len(executor.batches[-1].starts)

    executor.emit(1)
    engine.submit((make_spec(3, prompt),))
    engine.step()

    admitted = executor.in_engine[3]
    batch = executor.batches[-1]
    assert batch.starts[batch.slots.tolist().index(admitted.slot)] == 8


def test_siblings_wait_for_the_leaders_first_token(pair: Pair) -> None:
    engine, executor = pair
    leader = make_spec(1, 6, request_id="both")
    sibling = make_spec(2, leader.prompt_ids.tolist(), request_id="both", leader_key=1)
    engine.submit((leader, sibling))

    engine.step()
    engine.step()
    assert executor.admitted == [1]
    executor.emit(1)
    engine.step()

    assert executor.admitted == [1, 2]


def test_the_executor_reports_what_it_found_in_its_cache(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 6),))
    engine.step()
    executor.find_prefix(1, 5)
    executor.emit(1)

    events = engine.step()

    assert [c for c in events.changes if isinstance(c, PrefixFound)] == [
        PrefixFound(key=1, at_s=0.0, num_cached_tokens=5)
    ]


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_end_reported_by_the_executor_comes_after_its_tokens(
    pair: Pair, num_tokens: int
) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 6, max_tokens=9),))
    engine.step()
    if num_tokens:
        executor.emit(1, num_tokens)
    executor.end(1, reason=FinishReason.STOP, stop_id=77)

    reported = [engine.step()]
    engine.check_integrity()

    assert outputs(reported).get(1, []) == tokens_from(1, 6, num_tokens)
    end = ends(reported)[1]
    assert isinstance(end, Completed)
    assert (end.reason, end.stop_id) == (FinishReason.STOP, 77)


def test_a_stop_found_by_the_scheduler_overrides_the_executors_report(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 6, max_tokens=9, stop_ids=(77,)),))
    engine.step()
    executor.emit_ids(1, 5, 77)
    executor.end(1, reason=FinishReason.LENGTH)

    (end,) = engine.step().ends

    assert isinstance(end, Completed)
    assert (end.reason, end.stop_id) == (FinishReason.STOP, 77)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, FailureReason.EXECUTOR_REQUEST_FAILED),
        ({"is_rejected": True}, FailureReason.EXECUTOR_REJECTED),
        ({"is_rejected": True, "is_constraint_error": True}, FailureReason.CONSTRAINT_REJECTED),
    ],
)
def test_a_failure_states_its_cause(
    pair: Pair, flags: dict[str, bool], reason: FailureReason
) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 6),))
    engine.submit((make_spec(2, 6),))
    engine.step()
    executor.fail(1, **flags)
    executor.emit(2)

    events = engine.step()
    engine.check_integrity()

    (end,) = events.ends
    assert isinstance(end, Failed)
    assert (end.key, end.reason) == (1, reason)
    assert events.keys.tolist() == [2]
    # What it wrote is not there for the next one.
    engine.submit((make_spec(3, executor.in_engine[2].spec.prompt_ids.tolist()),))
    engine.submit((make_spec(1, 6),))
    engine.step()
    starts = dict(
        zip(executor.batches[-1].slots.tolist(), executor.batches[-1].starts.tolist(), strict=True)
    )
    assert starts[executor.in_engine[1].slot] == 0
    assert starts[executor.in_engine[3].slot] == 4


def test_events_of_a_slot_that_was_released_meanwhile_are_dropped(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 6, max_tokens=9),))
    engine.step()
    executor.emit(1)
    engine.cancel(1)

    events = engine.step()

    assert events.keys.tolist() == []
    assert [end.key for end in events.ends] == [1]
    assert executor.in_engine == {}


def test_running_requests_wake_their_engine_at_their_deadline() -> None:
    clock = FakeClock()
    engine, _executor = make_self_paced(clock=clock)
    engine.submit((make_spec(1, 6, deadline_s=5.0),))
    engine.step()

    assert engine.next_wakeup_s() == 5.0
    clock.now_s = 5.0
    (end,) = engine.step().ends

    assert end.reason is FailureReason.DEADLINE_EXCEEDED
    engine.close()


def test_the_first_token_meets_its_deadline() -> None:
    clock = FakeClock()
    engine, executor = make_self_paced(clock=clock)
    engine.submit((make_spec(1, 6, max_tokens=9, ttft_deadline_s=5.0),))
    engine.step()
    executor.emit(1)
    engine.step()

    clock.now_s = 6.0
    assert engine.step().ends == ()
    assert engine.next_wakeup_s() > 1e9
    engine.close()


def test_a_request_is_admitted_by_its_whole_size_whatever_can_be_reused() -> None:
    engine, executor = make_self_paced(
        num_blocks=8, admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT
    )
    prompt = list(range(16))
    engine.submit((make_spec(1, [*prompt, 20], max_tokens=7),))
    engine.step()
    executor.emit(1)
    engine.submit((make_spec(2, [*prompt, 21], max_tokens=3),))
    engine.step()
    # Five blocks are needed, four of them there: two are free, and the engine asks for five.
    assert executor.admitted == [1]
    engine.cancel(1)
    engine.step()

    assert executor.admitted == [1, 2]
    engine.close()


def test_pages_before_a_step_are_reported_too(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 9),))
    engine.step()
    engine.submit((make_spec(2, 5),))
    engine.step()

    batch = executor.batches[-1]
    assert (batch.num_old_blocks, batch.num_used_blocks) == (3, 5)


def test_a_preempted_request_is_admitted_again_with_its_output() -> None:
    engine, executor = make_self_paced(
        num_blocks=6, admission_policy=AdmissionPolicy.MAX_UTILIZATION, watermark=0.0
    )
    engine.submit((make_spec(1, 8, max_tokens=15),))
    engine.submit((make_spec(2, 8, max_tokens=15),))
    reported = [engine.step()]
    for _ in range(200):
        for key in list(executor.in_engine):
            executor.emit(key)
        reported.append(engine.step())
        engine.check_integrity()
        if not engine.has_work:
            break

    assert executor.admitted.count(2) > 1
    assert outputs(reported) == {1: tokens_from(1, 8, 15), 2: tokens_from(2, 8, 15)}
    engine.close()


def test_pages_in_use_are_reported_with_every_step(pair: Pair) -> None:
    engine, executor = pair
    engine.submit((make_spec(1, 9, max_tokens=1),))
    engine.step()
    assert executor.batches[-1].num_used_blocks == 3
    executor.emit(1)
    engine.step()

    assert executor.batches[-1].num_used_blocks == 0


def test_a_self_paced_executor_has_no_pipeline() -> None:
    with pytest.raises(ValueError, match="pipeline_depth"):
        replace(make_info(pipeline_depth=2), is_self_paced=True)
