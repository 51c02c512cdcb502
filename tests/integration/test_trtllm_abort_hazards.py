"""TensorRT-LLM acknowledges aborts late or never: the resulting waits, and their limits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from support.trtllm_engine import (
    ABORT_TIMEOUT_S,
    BuildHarness,
    fake_module,
    greedy_spec,
    reference,
    wrapped,
)


def test_an_active_request_reports_that_it_was_cancelled_and_needs_no_timeout(
    build: BuildHarness,
) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(3)
    harness.engine.cancel(1)
    harness.turn()
    assert len(harness.control.aborted) == 1
    assert harness.num_in_engine == 1, "its pages are the engine's until it says so"
    harness.iterate()
    harness.turn()

    assert harness.finish(1) is FinishReason.CANCELLED
    harness.check_clean(num_lost=0)


def test_a_request_in_the_engines_own_queue_is_abandoned_after_the_abort_timeout(
    build: BuildHarness,
) -> None:
    harness = build()
    harness.submit(greedy_spec(1), greedy_spec(2))
    harness.turn()
    harness.engine.cancel(1)
    harness.turn()
    # Request 1 is aborted before an iteration: it leaves the queue without an event.
    harness.iterate(6)
    harness.turn()
    assert harness.finish(2) is FinishReason.LENGTH
    assert harness.view().num_results == 1
    assert harness.num_in_engine == 1

    harness.pass_loop_time(ABORT_TIMEOUT_S * 0.9)
    harness.turn()
    assert (harness.num_in_engine, harness.executor.num_unconfirmed_aborts) == (1, 0)

    harness.pass_loop_time(ABORT_TIMEOUT_S * 0.2)
    assert harness.is_ready()
    harness.turn()
    harness.check_clean(num_lost=1)


def test_a_request_that_ended_by_itself_is_not_aborted(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=3), greedy_spec(2, max_tokens=40))
    harness.round(2)
    harness.iterate(2)
    # The engine has ended request 1; the adapter has not read that yet.
    harness.engine.cancel(1)
    harness.turn()
    harness.engine.cancel(2)
    harness.round()

    assert harness.finish(1) is FinishReason.CANCELLED
    assert list(harness.control.aborted) == [harness.control.submitted[-1].id]
    harness.check_clean()


def test_an_end_that_crosses_the_abort_needs_no_timeout(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=2))
    harness.turn()

    def end_first(abort: Any, result: Any) -> None:
        # The last response is in transit when `abort` is called.
        harness.control.step(2)
        abort(result)

    wrapped(monkeypatch, fake_module("executor.result").RequestOutput, "abort", end_first)
    harness.engine.cancel(1)
    harness.turn()
    harness.turn()

    assert harness.finish(1) is FinishReason.CANCELLED
    harness.check_clean(num_lost=0)


def test_every_request_is_aborted_at_most_once(build: BuildHarness) -> None:
    harness = build()
    specs = [greedy_spec(key, max_tokens=50) for key in range(1, 5)]
    harness.submit(*specs)
    harness.round(2)
    for key in (1, 2, 3):
        harness.engine.cancel(key)
        harness.engine.cancel(key)
        harness.turn()
    # The aborts of 1 to 3 are unanswered and 4 runs when the executor closes.
    harness.executor.close()

    aborted = list(harness.control.aborted)
    assert sorted(aborted) == sorted(item.id for item in harness.control.submitted[-4:])
    assert harness.control.shutdown_threads == ("trtllm shutdown",)


def test_late_responses_of_an_aborted_request_are_dropped(build: BuildHarness) -> None:
    harness = build(max_batch_size=1)
    first, second = greedy_spec(1, max_tokens=40), greedy_spec(2, max_tokens=5)
    harness.submit(first, second)
    harness.round(2)
    harness.iterate(3)
    # Three unread responses of request 1 exist when request 2 gets its slot.
    harness.engine.cancel(1)
    harness.run_until_idle()

    assert harness.tokens(1) == reference(harness, first.prompt_ids.tolist(), 2)
    assert harness.tokens(2) == reference(harness, second.prompt_ids.tolist(), 5)
    harness.check_clean()


def test_a_failure_after_an_abort_is_an_end_like_any_other(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(2)
    harness.engine.cancel(1)
    harness.control.inject("fail_all")
    harness.control.wait_for_iteration(harness.view().iteration + 1)
    harness.run_until_idle()

    assert harness.finish(1) is FinishReason.CANCELLED
    harness.check_clean(num_lost=0)


def test_a_request_that_the_engine_cancels_by_itself_has_failed(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(2)
    harness.control._proxy.engine.put(harness.control.submitted[-1].id)
    harness.run_until_idle()

    assert harness.failure(1) is FailureReason.EXECUTOR_REQUEST_FAILED
    harness.check_clean()


@pytest.mark.parametrize("is_over", [False, True])
def test_repeated_commands_abort_once_and_never_after_the_end(
    build: BuildHarness, is_over: bool
) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(2)
    ((submitted, stream),) = harness.streams._streams.items()
    assert stream.result is not None
    stream.result.finished = is_over
    for _ in range(2):
        harness.thread.post(harness.streams.abort_and_submit, [submitted], [])
    harness.settle()

    assert len(harness.control.aborted) == (0 if is_over else 1)
    # Nothing waits longer than the abort timeout, whatever the engine does.
    harness.pass_loop_time(ABORT_TIMEOUT_S)
    assert len(harness.streams) == 0
