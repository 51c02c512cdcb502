"""TensorRT-LLM acknowledges aborts late or never: the resulting waits, and their limits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from support.trtllm_engine import (
    GRACE_S,
    Houses,
    fake_module,
    greedy_spec,
    reference,
    wrapped,
)


def test_an_active_request_reports_that_it_was_cancelled_and_needs_no_grace(build: Houses) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=40))
    house.round(3)
    house.engine.cancel(1)
    house.turn()
    assert len(house.control.aborted) == 1
    assert house.num_inside == 1, "its pages are the engine's until it says so"
    house.iterate()
    house.turn()

    assert house.finish(1) is FinishReason.CANCELLED
    house.check_clean(num_lost=0)


def test_a_request_in_the_engines_own_queue_is_given_up_after_the_grace(build: Houses) -> None:
    house = build()
    house.submit(greedy_spec(1), greedy_spec(2))
    house.turn()
    house.engine.cancel(1)
    house.turn()
    # Both came before any iteration: it is dropped from the queue without an event.
    house.iterate(6)
    house.turn()
    assert house.finish(2) is FinishReason.LENGTH
    assert house.view().num_results == 1
    assert house.num_inside == 1

    house.pass_loop_time(GRACE_S * 0.9)
    house.turn()
    assert (house.num_inside, house.executor.num_given_up) == (1, 0)

    house.pass_loop_time(GRACE_S * 0.2)
    assert house.is_ready()
    house.turn()
    house.check_clean(num_lost=1)


def test_a_request_that_ended_by_itself_is_not_aborted(build: Houses) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=3), greedy_spec(2, max_tokens=40))
    house.round(2)
    house.iterate(2)
    # The engine has ended it; our side does not know yet.
    house.engine.cancel(1)
    house.turn()
    house.engine.cancel(2)
    house.round()

    assert house.finish(1) is FinishReason.CANCELLED
    assert list(house.control.aborted) == [house.control.submitted[-1].id]
    house.check_clean()


def test_an_end_that_crosses_the_abort_needs_no_grace(
    build: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=2))
    house.turn()

    def end_first(abort: Any, result: Any) -> None:
        # The last response is on its way when abort is called.
        house.control.step(2)
        abort(result)

    wrapped(monkeypatch, fake_module("executor.result").RequestOutput, "abort", end_first)
    house.engine.cancel(1)
    house.turn()
    house.turn()

    assert house.finish(1) is FinishReason.CANCELLED
    house.check_clean(num_lost=0)


def test_every_request_is_aborted_at_most_once(build: Houses) -> None:
    house = build()
    specs = [greedy_spec(key, max_tokens=50) for key in range(1, 5)]
    house.submit(*specs)
    house.round(2)
    for key in (1, 2, 3):
        house.engine.cancel(key)
        house.engine.cancel(key)
        house.turn()
    # 1 to 3 are aborted and unanswered, 4 runs, and now everything ends.
    house.executor.close()

    aborted = list(house.control.aborted)
    assert sorted(aborted) == sorted(item.id for item in house.control.submitted[-4:])
    assert house.control.shutdown_threads == ("trtllm shutdown",)


def test_late_responses_of_an_aborted_request_are_dropped(build: Houses) -> None:
    house = build(max_batch_size=1)
    first, second = greedy_spec(1, max_tokens=40), greedy_spec(2, max_tokens=5)
    house.submit(first, second)
    house.round(2)
    house.iterate(3)
    # Three responses wait for our side when the slot changes hands.
    house.engine.cancel(1)
    house.run_until_idle()

    assert house.tokens(1) == reference(house, first.prompt_ids.tolist(), 2)
    assert house.tokens(2) == reference(house, second.prompt_ids.tolist(), 5)
    house.check_clean()


def test_a_failure_after_an_abort_is_an_end_like_any_other(build: Houses) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=40))
    house.round(2)
    house.engine.cancel(1)
    house.control.inject("fail_all")
    house.control.wait_for_iteration(house.view().iteration + 1)
    house.run_until_idle()

    assert house.finish(1) is FinishReason.CANCELLED
    house.check_clean(num_lost=0)


def test_a_request_that_the_engine_cancels_by_itself_has_failed(build: Houses) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=40))
    house.round(2)
    house.control._proxy.engine.put(house.control.submitted[-1].id)
    house.run_until_idle()

    assert house.failure(1) is FailureReason.EXECUTOR_REQUEST_FAILED
    house.check_clean()


@pytest.mark.parametrize("is_over", [False, True])
def test_no_order_makes_a_second_abort_or_one_of_what_is_over(build: Houses, is_over: bool) -> None:
    house = build()
    house.submit(greedy_spec(1, max_tokens=40))
    house.round(2)
    ((submitted, stream),) = house.streams._streams.items()
    assert stream.result is not None
    stream.result.finished = is_over
    for _ in range(2):
        house.thread.post(house.streams.carry_out, [submitted], [])
    house.settle()

    assert len(house.control.aborted) == (0 if is_over else 1)
    # Whatever the engine does, nothing waits longer than the grace period.
    house.pass_loop_time(GRACE_S)
    assert len(house.streams) == 0
