"""The scheduler selects requests; the TensorRT-LLM engine never has more than it can run."""

from __future__ import annotations

import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from support.core import BLOCK_SIZE
from support.trtllm_engine import (
    GRACE_S,
    Houses,
    TrtllmHouse,
    greedy_spec,
    reference,
)


def check_everyone_runs(house: TrtllmHouse) -> None:
    """Check, between iterations, that no request waits in the engine and that each active one has
    pages.
    """
    assert house.view().waiting == ()
    active = house.control._engine.active
    assert len(active) <= house.executor.info.max_num_seqs
    assert [request.client_id for request in active.values() if not request.blocks] == []


def run_watched(house: TrtllmHouse, max_rounds: int = 500) -> int:
    """Run until idle; return the maximum number of requests that were active at the same time."""
    most = 0
    for _ in range(max_rounds):
        if not (house.engine.has_work or house.num_inside):
            return most
        house.turn()
        assert house.num_inside <= house.executor.info.max_num_seqs
        house.iterate()
        check_everyone_runs(house)
        most = max(most, len(house.view().active))
    raise AssertionError("still busy")


@pytest.mark.parametrize("num_blocks", [7, 10, 13])
def test_the_engine_never_holds_what_it_cannot_run_for_want_of_pages(
    build: Houses, num_blocks: int
) -> None:
    house = build(max_batch_size=8, num_blocks=num_blocks)
    # Lengths on both sides of a page's end.
    specs = [
        greedy_spec(key, 1 + key % 9, max_tokens=1 + (5 * key) % 12, hashed=key % 2 == 0)
        for key in range(1, 25)
    ]
    house.submit(*specs)

    assert 1 < run_watched(house) < 8
    assert [house.tokens(spec.key) for spec in specs] == [
        reference(house, spec.prompt_ids.tolist(), spec.max_tokens) for spec in specs
    ]
    house.check_clean()


def test_the_engine_never_holds_what_it_cannot_run_while_others_leave(build: Houses) -> None:
    house = build(max_batch_size=4, num_blocks=13)
    house.submit(*(greedy_spec(key, 4 + key % 9, max_tokens=8) for key in range(1, 25)))
    for key in range(1, 25, 2):
        house.turn()
        house.engine.cancel(key)
        house.iterate()
        check_everyone_runs(house)
    run_watched(house)
    house.check_clean()


@pytest.mark.parametrize("num_over", [0, 1])
def test_a_request_as_large_as_the_cache_runs_or_is_rejected(build: Houses, num_over: int) -> None:
    """The engine reserves pages for every token, also for the last one, which is never computed."""
    num_blocks = 4
    house = build(num_blocks=num_blocks)
    whole = greedy_spec(1, 6, max_tokens=num_blocks * BLOCK_SIZE - 6 + num_over)
    house.submit(whole, greedy_spec(2, max_tokens=3))
    house.run_until_idle()

    if num_over:
        assert house.failure(1) is FailureReason.EXCEEDS_KV_CACHE
        assert house.submitted_keys == [2]
    else:
        assert house.finish(1) is FinishReason.LENGTH
    assert house.finish(2) is FinishReason.LENGTH
    house.check_clean()


def test_a_prompt_longer_than_a_step_goes_in_and_does_not_block_others(build: Houses) -> None:
    house = build(max_num_tokens=16, max_batch_size=4)
    specs = [greedy_spec(1, 50, max_tokens=4), *(greedy_spec(k, 6, max_tokens=4) for k in (2, 3))]
    house.submit(*specs)
    house.run_until_idle()

    assert [house.tokens(spec.key) for spec in specs] == [
        reference(house, spec.prompt_ids.tolist(), 4) for spec in specs
    ]


def test_the_urgent_one_that_comes_last_goes_in_first(build: Houses) -> None:
    house = build(max_batch_size=4)
    crowd = [greedy_spec(key, max_tokens=6, priority=-5) for key in range(1, 13)]
    house.submit(*crowd)
    house.round(2)
    house.submit(greedy_spec(20, max_tokens=3, priority=90))
    house.run_until_idle()

    assert house.submitted_keys == [1, 2, 3, 4, 20, *range(5, 13)]


def test_a_request_that_expires_while_waiting_never_reaches_the_engine(build: Houses) -> None:
    house = build(max_batch_size=1)
    house.submit(greedy_spec(1, max_tokens=10))
    house.round(1)
    house.submit(
        greedy_spec(2, deadline_s=5.0),
        greedy_spec(3, ttft_deadline_s=5.0),
        greedy_spec(4, time_limit_s=5.0),
        greedy_spec(5),
    )
    house.round(1)
    house.clock.now_s = 6.0
    house.run_until_idle()

    assert house.failure(2) is FailureReason.DEADLINE_EXCEEDED
    assert house.failure(3) is FailureReason.TTFT_DEADLINE_EXCEEDED
    assert house.finish(4) is FinishReason.TIME_LIMIT
    assert house.submitted_keys == [1, 5]
    assert list(house.control.aborted) == []


def test_a_request_cancelled_while_waiting_never_reaches_the_engine(build: Houses) -> None:
    house = build(max_batch_size=1)
    house.submit(*(greedy_spec(key, max_tokens=5) for key in (1, 2, 3)))
    house.round(2)
    house.engine.cancel(2)
    house.run_until_idle()

    assert house.finish(2) is FinishReason.CANCELLED
    assert house.submitted_keys == [1, 3]
    assert list(house.control.aborted) == []


def test_a_running_request_that_expires_is_aborted(build: Houses) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=40, deadline_s=5.0))
    house.round(3)
    assert house.engine.next_wakeup_s() == 5.0
    house.clock.now_s = 5.0
    house.run_until_idle()

    assert house.failure(1) is FailureReason.DEADLINE_EXCEEDED
    assert len(house.control.aborted) == 1
    house.check_clean()


def test_after_an_abort_the_next_goes_in_when_the_engine_let_go(build: Houses) -> None:
    house = build(max_batch_size=2)
    house.submit(*(greedy_spec(key, max_tokens=20) for key in (1, 2, 3)))
    house.round(2)
    house.engine.cancel(1)
    house.turn()
    house.turn()
    # Our scheduler has admitted 3; the engine has not received it, because it still holds 1.
    assert len(house.engine.running) == 2
    assert house.submitted_keys == [1, 2]
    house.iterate()
    house.turn()

    assert house.submitted_keys == [1, 2, 3]
    assert house.executor.num_given_up == 0


def test_after_an_abort_without_an_answer_the_next_goes_in_after_the_grace(build: Houses) -> None:
    house = build(max_batch_size=2)
    house.submit(*(greedy_spec(key, max_tokens=5) for key in (1, 2, 3)))
    house.turn()
    house.engine.cancel(1)
    house.turn()
    assert house.submitted_keys == [1, 2]
    house.pass_loop_time(GRACE_S)
    house.turn()

    assert house.submitted_keys == [1, 2, 3]
    assert house.executor.num_given_up == 1
    house.run_until_idle()
    house.check_clean(num_lost=1)


@pytest.mark.parametrize("has_first_left", [False, True])
def test_a_request_cancelled_on_the_way_in_never_reaches_the_engine(
    build: Houses, has_first_left: bool
) -> None:
    house = build(max_batch_size=1)
    house.submit(greedy_spec(1, max_tokens=20), greedy_spec(2), greedy_spec(3))
    house.round(2)
    house.engine.cancel(1)
    house.turn()
    # 2 has 1's slot, and waits for 1 to leave the engine.
    if has_first_left:
        house.iterate()
    house.engine.cancel(2)
    house.run_until_idle()

    assert house.submitted_keys == [1, 3]
    assert len(house.control.aborted) == 1
    house.check_clean()


def test_requests_that_share_a_prefix_are_all_inside_to_run(build: Houses) -> None:
    house = build(num_blocks=16, max_batch_size=4)
    shared = list(range(3, 3 + 6 * BLOCK_SIZE))
    house.submit(greedy_spec(1, shared, max_tokens=2))
    house.run_until_idle()
    for key in range(2, 8):
        house.submit(greedy_spec(key, [*shared, key], max_tokens=2 * BLOCK_SIZE))

    num_inside = 0
    while house.engine.has_work or house.num_inside:
        house.turn()
        house.iterate()
        view = house.view()
        # A request in the engine runs, or begins with the next iteration.
        assert not view.waiting
        num_inside = max(num_inside, len(view.active))
        house.turn()

    assert num_inside > 0
    assert all(house.finish(key) is FinishReason.LENGTH for key in range(1, 8))
    house.check_clean()
