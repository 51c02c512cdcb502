"""Limits that the TensorRT-LLM engine reports at the start, cache pages that it reports later, and
wrong reports.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from penstock.executor.trtllm.response_queue import ResponseQueue
from penstock.scheduler.events import PrefixFound
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import FinishReason
from support.timeout import TEST_TIMEOUT_S
from support.trtllm_engine import (
    BuildHarness,
    TrtllmHarness,
    fake_module,
    greedy_spec,
    wrapped,
)


def test_limits_are_those_of_the_engine_and_not_the_requested_ones(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def less(limits_of: Any, *arguments: Any) -> Any:
        found = limits_of(*arguments)
        return replace(found, num_blocks=11, tokens_per_block=8, max_batch_size=3)

    wrapped(monkeypatch, fake_module("llmapi.llm"), "limits_of", less)
    harness = build(num_blocks=64, max_batch_size=8)
    info = harness.executor.info
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (11, 8, 3)

    harness.submit(*(greedy_spec(key, 9, max_tokens=9, block_size=8) for key in range(1, 9)))
    most = 0
    for _ in range(200):
        harness.round()
        most = max(most, len(harness.view().active))
        assert harness.view().waiting == ()
    assert most == 3
    harness.check_clean()


def test_an_engine_with_higher_limits_is_restricted_to_the_settings(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped(
        monkeypatch,
        fake_module("llmapi.llm"),
        "limits_of",
        lambda limits_of, *arguments: replace(limits_of(*arguments), max_batch_size=500),
    )
    harness = build(max_batch_size=4)

    assert harness.executor.info.max_num_seqs == 4


def test_an_engine_without_statistics_does_not_start(build: BuildHarness) -> None:
    with pytest.raises(ExecutorDied, match="reports no KV cache statistics"):
        build(fake={"has_stats": False}, watch={"limits_timeout_s": 0.05})

    # The engine is shut down, because the next attempt needs the memory.
    control = fake_module("fake_control").engine()
    assert control.shutdown_threads == ("trtllm shutdown",)
    assert not control.view().is_alive


def test_an_engine_that_dies_while_reporting_its_limits_does_not_start(
    build: BuildHarness,
) -> None:
    with pytest.raises(Exception, match="the executor failed"):
        build(fake={"fatal_at": 1})
    assert not fake_module("fake_control").engine().view().is_alive


def test_an_engine_that_does_not_report_its_limits_does_not_start(
    build: BuildHarness,
) -> None:
    with pytest.raises(ExecutorDied, match="it is unresponsive"):
        build(fake={"kill_loop_at": 1}, watch={"limits_timeout_s": 0.05})
    control = fake_module("fake_control").engine()
    assert control.shutdown_threads == ("trtllm shutdown",)


def test_an_engine_that_cannot_be_built_states_why(build: BuildHarness) -> None:
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        build(fake={"build_error": "CUDA out of memory"})


def run_one(harness: TrtllmHarness, key: int) -> None:
    harness.submit(greedy_spec(key))
    harness.run_until_idle()
    assert harness.finish(key) is FinishReason.LENGTH


def test_statistics_that_ended_are_read_again_after_the_next_submission(
    build: BuildHarness,
) -> None:
    harness = build()
    run_one(harness, 1)
    num_checks = harness.executor.audit.num_checks
    assert num_checks > 0
    for key in (2, 3):
        # Long and repeated pauses do not end the reports.
        harness.pass_loop_time(100_000.0)
        run_one(harness, key)
        assert harness.executor.audit.num_checks > num_checks
        assert harness.view().num_unread_stats == 0
        num_checks = harness.executor.audit.num_checks


@pytest.mark.parametrize("gap_s", [1.0, 1.99, 3.0])
def test_a_submission_just_before_the_statistics_end_is_not_the_last_one_seen(
    build: BuildHarness, gap_s: float
) -> None:
    """A submission restarts the iterator over statistics shortly before it ends; its end must not
    stop the reports.
    """
    harness = build()
    run_one(harness, 1)
    harness.pass_loop_time(gap_s)
    harness.submit(greedy_spec(2, max_tokens=30))
    harness.turn()
    harness.pass_loop_time(1.5)  # a long first iteration
    harness.round(4)

    assert harness.view().num_unread_stats == 0


def test_fetched_statistics_reach_the_audit_and_block_nothing(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(*_arguments: Any) -> Any:
        raise AssertionError("the iterator blocks the loop")

    noted = threading.Event()

    def note(original: Any, *arguments: Any) -> None:
        original(*arguments)
        noted.set()

    monkeypatch.setattr(fake_module("llmapi.llm").LLM, "get_stats_async", blocks)
    wrapped(monkeypatch, ResponseQueue, "put_stats", note)
    harness = build(fake={"stats": "rpc"}, is_free=True)
    for key in range(1, 4):
        harness.submit(greedy_spec(key, max_tokens=20))
        harness.run_free()

    # All statistics are read, however many iterations the engine ran.
    while not harness.executor.audit.num_checks or harness.view().num_unread_stats:
        assert noted.wait(TEST_TIMEOUT_S)
        noted.clear()
        harness.turn()


def test_missing_fetched_statistics_do_not_block_the_start(
    build: BuildHarness,
) -> None:
    """Reading the missing statistics blocks for the whole timeout, but on a thread other than the
    event loop's.
    """
    with pytest.raises(ExecutorDied, match="reports no KV cache statistics"):
        build(fake={"has_stats": False, "stats": "rpc"}, watch={"limits_timeout_s": 0.05})


def test_the_block_account_equals_the_engines_during_arrivals_ends_and_cancels(
    build: BuildHarness,
) -> None:
    harness = build(num_blocks=24, max_batch_size=4)
    harness.submit(
        *(greedy_spec(key, 1 + key % 9, max_tokens=3 + key % 11) for key in range(1, 33))
    )
    for turn in range(150):
        harness.clock.now_s += 1.0
        harness.round()
        if turn % 5 == 0:
            harness.engine.cancel(1 + turn % 32)
    harness.run_until_idle()

    audit = harness.executor.audit
    assert audit.num_checks > 50
    assert (audit.num_drifts, audit.worst_drift) == (0, 0)
    harness.check_clean()


@pytest.mark.parametrize("num_missing", [-20, 20])
def test_drift_is_counted_and_fails_nothing(build: BuildHarness, num_missing: int) -> None:
    harness = build(num_blocks=64)
    harness.control.settings.free_blocks_drift = -num_missing
    harness.submit(*(greedy_spec(key, 20, max_tokens=20) for key in (1, 2, 3)))
    harness.run_until_idle()

    audit = harness.executor.audit
    assert [harness.finish(key) for key in (1, 2, 3)] == [FinishReason.LENGTH] * 3
    assert audit.num_drifts > 0
    assert f"drifts={audit.num_drifts}" in harness.executor.account()
    assert audit.worst_drift * num_missing > 0
    harness.check_clean()


def test_the_engines_cached_token_count_replaces_the_prediction(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build()
    stem = list(range(900, 916))
    harness.submit(greedy_spec(1, [*stem, 1]))
    harness.run_until_idle()
    harness.submit(greedy_spec(2, [*stem, 2]))
    harness.run_until_idle()
    assert harness.outcomes[2].num_cached_tokens == 16
    assert harness.executor.num_cache_misses == 0

    # The engine may evict any page.
    monkeypatch.setattr(harness.control._engine.pool, "match", lambda _keys: [])
    harness.submit(greedy_spec(3, [*stem, 3]))
    harness.turn()
    harness.iterate()
    events = harness.engine.step()
    assert [change for change in events.changes if isinstance(change, PrefixFound)] == [
        PrefixFound(key=3, at_s=0.0, num_cached_tokens=0)
    ]
    assert harness.executor.num_cache_misses == 1


def test_statistics_that_arrive_during_shutdown_do_not_delay_it(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for` in Python 3.11 loses a cancellation if it has a result to return."""
    harness = build(watch={"shutdown_timeout_s": 1.0})
    run_one(harness, 1)
    num_swallowed = 0

    async def swallowing(anext_of: Any, result: Any) -> Any:
        nonlocal num_swallowed
        try:
            return await anext_of(result)
        except asyncio.CancelledError:
            num_swallowed += 1
            return {}

    wrapped(monkeypatch, fake_module("executor.result").IterationResult, "__anext__", swallowing)
    harness.submit(greedy_spec(2))
    harness.run_until_idle()
    harness.executor.close()

    assert num_swallowed == 1
    assert harness.control.shutdown_threads == ("trtllm shutdown",)
