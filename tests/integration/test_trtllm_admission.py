"""The scheduler selects requests; the TensorRT-LLM engine never has more than it can run."""

from __future__ import annotations

import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from support.core import BLOCK_SIZE
from support.trtllm_engine import (
    ABORT_TIMEOUT_S,
    BuildHarness,
    TrtllmHarness,
    greedy_spec,
    reference,
)


def check_everyone_runs(harness: TrtllmHarness) -> None:
    """Check, between iterations, that no request waits in the engine and that each active one has
    pages.
    """
    assert harness.view().waiting == ()
    active = harness.control._engine.active
    assert len(active) <= harness.executor.info.max_num_seqs
    assert [request.client_id for request in active.values() if not request.blocks] == []


def run_watched(harness: TrtllmHarness, max_rounds: int = 500) -> int:
    """Run until idle; return the maximum number of requests that were active at the same time."""
    most = 0
    for _ in range(max_rounds):
        if not (harness.engine.has_work or harness.num_in_engine):
            return most
        harness.turn()
        assert harness.num_in_engine <= harness.executor.info.max_num_seqs
        harness.iterate()
        check_everyone_runs(harness)
        most = max(most, len(harness.view().active))
    raise AssertionError("still busy")


@pytest.mark.parametrize("num_blocks", [7, 10, 13])
def test_the_engine_never_has_a_request_that_lacks_pages(
    build: BuildHarness, num_blocks: int
) -> None:
    harness = build(max_batch_size=8, num_blocks=num_blocks)
    # Lengths on both sides of a page's end.
    specs = [
        greedy_spec(key, 1 + key % 9, max_tokens=1 + (5 * key) % 12, hashed=key % 2 == 0)
        for key in range(1, 25)
    ]
    harness.submit(*specs)

    assert 1 < run_watched(harness) < 8
    assert [harness.tokens(spec.key) for spec in specs] == [
        reference(harness, spec.prompt_ids.tolist(), spec.max_tokens) for spec in specs
    ]
    harness.check_clean()


def test_the_engine_never_has_a_request_that_must_wait_for_cancelled_ones(
    build: BuildHarness,
) -> None:
    harness = build(max_batch_size=4, num_blocks=13)
    harness.submit(*(greedy_spec(key, 4 + key % 9, max_tokens=8) for key in range(1, 25)))
    for key in range(1, 25, 2):
        harness.turn()
        harness.engine.cancel(key)
        harness.iterate()
        check_everyone_runs(harness)
    run_watched(harness)
    harness.check_clean()


@pytest.mark.parametrize("num_over", [0, 1])
def test_a_request_as_large_as_the_cache_runs_or_is_rejected(
    build: BuildHarness, num_over: int
) -> None:
    """The engine reserves pages for all tokens, including the last one, which is never computed."""
    num_blocks = 4
    harness = build(num_blocks=num_blocks)
    whole = greedy_spec(1, 6, max_tokens=num_blocks * BLOCK_SIZE - 6 + num_over)
    harness.submit(whole, greedy_spec(2, max_tokens=3))
    harness.run_until_idle()

    if num_over:
        assert harness.failure(1) is FailureReason.EXCEEDS_KV_CACHE
        assert harness.submitted_keys == [2]
    else:
        assert harness.finish(1) is FinishReason.LENGTH
    assert harness.finish(2) is FinishReason.LENGTH
    harness.check_clean()


def test_a_prompt_longer_than_a_step_is_submitted_and_does_not_block_others(
    build: BuildHarness,
) -> None:
    harness = build(max_num_tokens=16, max_batch_size=4)
    specs = [greedy_spec(1, 50, max_tokens=4), *(greedy_spec(k, 6, max_tokens=4) for k in (2, 3))]
    harness.submit(*specs)
    harness.run_until_idle()

    assert [harness.tokens(spec.key) for spec in specs] == [
        reference(harness, spec.prompt_ids.tolist(), 4) for spec in specs
    ]


def test_a_late_request_of_high_priority_is_submitted_first(build: BuildHarness) -> None:
    harness = build(max_batch_size=4)
    crowd = [greedy_spec(key, max_tokens=6, priority=-5) for key in range(1, 13)]
    harness.submit(*crowd)
    harness.round(2)
    harness.submit(greedy_spec(20, max_tokens=3, priority=90))
    harness.run_until_idle()

    assert harness.submitted_keys == [1, 2, 3, 4, 20, *range(5, 13)]


def test_a_request_that_expires_while_waiting_never_reaches_the_engine(build: BuildHarness) -> None:
    harness = build(max_batch_size=1)
    harness.submit(greedy_spec(1, max_tokens=10))
    harness.round(1)
    harness.submit(
        greedy_spec(2, deadline_s=5.0),
        greedy_spec(3, ttft_deadline_s=5.0),
        greedy_spec(4, time_limit_s=5.0),
        greedy_spec(5),
    )
    harness.round(1)
    harness.clock.now_s = 6.0
    harness.run_until_idle()

    assert harness.failure(2) is FailureReason.DEADLINE_EXCEEDED
    assert harness.failure(3) is FailureReason.TTFT_DEADLINE_EXCEEDED
    assert harness.finish(4) is FinishReason.TIME_LIMIT
    assert harness.submitted_keys == [1, 5]
    assert list(harness.control.aborted) == []


def test_a_request_cancelled_while_waiting_never_reaches_the_engine(build: BuildHarness) -> None:
    harness = build(max_batch_size=1)
    harness.submit(*(greedy_spec(key, max_tokens=5) for key in (1, 2, 3)))
    harness.round(2)
    harness.engine.cancel(2)
    harness.run_until_idle()

    assert harness.finish(2) is FinishReason.CANCELLED
    assert harness.submitted_keys == [1, 3]
    assert list(harness.control.aborted) == []


def test_a_running_request_that_expires_is_aborted(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40, deadline_s=5.0))
    harness.round(3)
    assert harness.engine.next_wakeup_s() == 5.0
    harness.clock.now_s = 5.0
    harness.run_until_idle()

    assert harness.failure(1) is FailureReason.DEADLINE_EXCEEDED
    assert len(harness.control.aborted) == 1
    harness.check_clean()


def test_after_an_abort_the_next_request_is_submitted_when_the_engine_has_released_it(
    build: BuildHarness,
) -> None:
    harness = build(max_batch_size=2)
    harness.submit(*(greedy_spec(key, max_tokens=20) for key in (1, 2, 3)))
    harness.round(2)
    harness.engine.cancel(1)
    harness.turn()
    harness.turn()
    # Our scheduler has admitted 3; the engine has not received it, because it still holds 1.
    assert len(harness.engine.running) == 2
    assert harness.submitted_keys == [1, 2]
    harness.iterate()
    harness.turn()

    assert harness.submitted_keys == [1, 2, 3]
    assert harness.executor.num_unconfirmed_aborts == 0


def test_after_an_unanswered_abort_the_next_request_is_submitted_after_the_abort_timeout(
    build: BuildHarness,
) -> None:
    harness = build(max_batch_size=2)
    harness.submit(*(greedy_spec(key, max_tokens=5) for key in (1, 2, 3)))
    harness.turn()
    harness.engine.cancel(1)
    harness.turn()
    assert harness.submitted_keys == [1, 2]
    harness.pass_loop_time(ABORT_TIMEOUT_S)
    harness.turn()

    assert harness.submitted_keys == [1, 2, 3]
    assert harness.executor.num_unconfirmed_aborts == 1
    harness.run_until_idle()
    harness.check_clean(num_lost=1)


@pytest.mark.parametrize("has_first_left", [False, True])
def test_a_request_cancelled_during_submission_never_reaches_the_engine(
    build: BuildHarness, has_first_left: bool
) -> None:
    harness = build(max_batch_size=1)
    harness.submit(greedy_spec(1, max_tokens=20), greedy_spec(2), greedy_spec(3))
    harness.round(2)
    harness.engine.cancel(1)
    harness.turn()
    # 2 has 1's slot, and waits for 1 to leave the engine.
    if has_first_left:
        harness.iterate()
    harness.engine.cancel(2)
    harness.run_until_idle()

    assert harness.submitted_keys == [1, 3]
    assert len(harness.control.aborted) == 1
    harness.check_clean()


def test_requests_that_share_a_prefix_all_run_at_once(build: BuildHarness) -> None:
    harness = build(num_blocks=16, max_batch_size=4)
    shared = list(range(3, 3 + 6 * BLOCK_SIZE))
    harness.submit(greedy_spec(1, shared, max_tokens=2))
    harness.run_until_idle()
    for key in range(2, 8):
        harness.submit(greedy_spec(key, [*shared, key], max_tokens=2 * BLOCK_SIZE))

    num_in_engine = 0
    while harness.engine.has_work or harness.num_in_engine:
        harness.turn()
        harness.iterate()
        view = harness.view()
        # A request in the engine runs, or begins with the next iteration.
        assert not view.waiting
        num_in_engine = max(num_in_engine, len(view.active))
        harness.turn()

    assert num_in_engine > 0
    assert all(harness.finish(key) is FinishReason.LENGTH for key in range(1, 8))
    harness.check_clean()
