"""A TensorRT-LLM engine that dies, hangs or does not stop is detected and reported within time
limits.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import FinishReason
from support.timeout import TEST_TIMEOUT_S
from support.trtllm_engine import (
    ABORT_TIMEOUT_S,
    HEALTH_INTERVAL_S,
    RESPONSE_TIMEOUT_S,
    BuildHarness,
    TrtllmHarness,
    fake_module,
    greedy_spec,
    wrapped,
)


def signal_shutdown(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a shutdown of the engine begins."""
    begun = threading.Event()

    def shutdown(original: Any, proxy: Any) -> None:
        begun.set()
        original(proxy)

    proxy_class = fake_module("executor.proxy").GenerationExecutorProxy
    wrapped(monkeypatch, proxy_class, "shutdown", shutdown)
    return begun


def test_a_fatal_error_is_raised_by_the_step(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1), greedy_spec(2))
    harness.round(2)
    harness.control.inject("fatal")
    harness.join_engine_loop()
    harness.settle()

    assert harness.is_ready()
    with pytest.raises(ExecutorDied, match="the executor failed"):
        harness.engine.step()
    # Its final message stays the same.
    with pytest.raises(ExecutorDied, match="the executor failed"):
        harness.engine.step()


def test_a_shutdown_that_blocks_inside_a_coroutine_does_not_block_the_scheduler(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build(fake={"shutdown_s": TEST_TIMEOUT_S})
    begun = signal_shutdown(monkeypatch)
    harness.submit(greedy_spec(1))
    harness.round(2)
    harness.control.inject("fatal")
    assert begun.wait(TEST_TIMEOUT_S)
    # The loop is stuck in the engine's own clean-up, and nothing can report it.
    harness.submit(greedy_spec(2))
    for _ in range(3):
        harness.engine.step()
    assert harness.engine.cancel(2)
    harness.engine.step()

    harness.clock.now_s += RESPONSE_TIMEOUT_S + 0.1
    with pytest.raises(ExecutorDied, match="returned nothing for 30 s"):
        harness.engine.step()
    assert harness.control.shutdown_threads == ("trtllm loop",)


def test_a_loop_that_dies_silently_is_detected_exactly_after_the_timeout(
    build: BuildHarness,
) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.clock.now_s = 100.0
    harness.round(3)
    received_at_s = harness.clock.now_s
    harness.control.inject("kill")
    harness.join_engine_loop()

    harness.clock.now_s = received_at_s + RESPONSE_TIMEOUT_S
    harness.turn()
    assert harness.llm._check_health(), "as the real one, it notices nothing"
    harness.clock.now_s = received_at_s + RESPONSE_TIMEOUT_S + 0.1
    with pytest.raises(ExecutorDied, match="about 1 requests inside"):
        harness.turn()


def test_the_response_timeout_starts_at_the_last_response_of_any_request(
    build: BuildHarness,
) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40), greedy_spec(2, max_tokens=40))
    for _ in range(5):
        harness.clock.now_s += RESPONSE_TIMEOUT_S
        harness.round()
    assert len(harness.tokens(1)) == 5


def test_the_response_timeout_starts_at_the_submission_to_an_idle_engine(
    build: BuildHarness,
) -> None:
    harness = build()
    harness.clock.now_s += 50 * RESPONSE_TIMEOUT_S
    harness.turn()
    harness.submit(greedy_spec(1))
    harness.turn()
    harness.clock.now_s += RESPONSE_TIMEOUT_S
    harness.turn()
    harness.clock.now_s += 0.1
    with pytest.raises(ExecutorDied, match="returned nothing for"):
        harness.turn()


def test_an_engine_that_hangs_in_an_iteration_counts_as_dead(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(2)
    harness.control.inject("hang")
    harness.turn()
    harness.clock.now_s += RESPONSE_TIMEOUT_S + 0.1
    with pytest.raises(ExecutorDied, match="returned nothing for"):
        harness.engine.step()
    harness.control.release()


def test_a_loop_that_died_while_only_an_aborted_request_was_inside(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(2)
    harness.control.inject("kill")
    harness.join_engine_loop()
    harness.engine.cancel(1)
    harness.turn()
    harness.pass_loop_time(ABORT_TIMEOUT_S)
    harness.turn()
    # The abort was not answered in time, so nothing waits for it any more.
    assert (harness.executor.num_unconfirmed_aborts, harness.num_in_engine) == (1, 0)
    harness.clock.now_s += 10 * RESPONSE_TIMEOUT_S
    harness.turn()
    # Only the next submission detects it, because it checks the engine.
    harness.submit(greedy_spec(2))
    harness.turn()
    with pytest.raises(ExecutorDied, match="the engine loop is dead"):
        harness.turn()


def test_the_death_of_an_idle_engine_is_detected_by_its_health_check(build: BuildHarness) -> None:
    harness = build(fake={"is_death_seen_by_health": True})
    harness.control.inject("kill")
    harness.join_engine_loop()
    harness.pass_loop_time(HEALTH_INTERVAL_S * 0.9)
    assert not harness.is_ready()

    harness.pass_loop_time(HEALTH_INTERVAL_S * 0.2)
    assert harness.is_ready(), "without any request"
    with pytest.raises(ExecutorDied, match="not healthy"):
        harness.engine.step()


def test_a_failing_health_check_counts_as_death(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build()

    def broken(_self: object) -> bool:
        raise OSError("no answer")

    monkeypatch.setattr(type(harness.llm), "_check_health", broken)
    harness.pass_loop_time(HEALTH_INTERVAL_S)
    with pytest.raises(ExecutorDied, match="no answer"):
        harness.engine.step()


def test_an_engine_that_shut_itself_down_is_detected_at_the_next_submission(
    build: BuildHarness,
) -> None:
    harness = build()
    harness.llm.shutdown()
    harness.submit(greedy_spec(1))
    harness.turn()

    assert harness.is_ready()
    with pytest.raises(ExecutorDied, match="LLM is shutting down"):
        harness.engine.step()


CUDA_ERROR = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("error", [AssertionError("the queue is closed"), ValueError(CUDA_ERROR)])
def test_an_unknown_error_at_submission_counts_as_death(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    harness = build()

    def broken(*_arguments: Any, **_keywords: Any) -> Any:
        raise error

    monkeypatch.setattr(harness.streams.llm, "generate_async", broken)
    harness.submit(greedy_spec(1))
    harness.turn()
    with pytest.raises(ExecutorDied, match=str(error)):
        harness.engine.step()


def test_a_cuda_error_in_a_result_counts_as_death_although_the_health_check_passes(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build()

    async def broken(_self: object) -> Any:
        raise RuntimeError(CUDA_ERROR)

    monkeypatch.setattr(fake_module("executor.result").RequestOutput, "__anext__", broken)
    harness.submit(greedy_spec(1))
    harness.turn()
    harness.settle()
    with pytest.raises(ExecutorDied, match="illegal memory access"):
        harness.engine.step()


def test_close_during_work_aborts_it_and_is_idempotent(build: BuildHarness) -> None:
    harness = build()
    harness.submit(*(greedy_spec(key, max_tokens=40) for key in range(1, 9)))
    harness.round(2)
    thread = harness.thread._thread
    harness.executor.close()
    harness.executor.close()

    assert len(harness.control.aborted) == 4
    assert harness.control.shutdown_threads == ("trtllm shutdown",)
    assert not harness.view().is_alive
    assert not thread.is_alive()
    assert harness.thread.loop.is_closed()
    with pytest.raises(ExecutorDied, match="closed"):
        harness.engine.step()


def test_close_returns_after_a_death(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1))
    harness.round(1)
    harness.control.inject("fatal")
    harness.join_engine_loop()
    harness.settle()
    with pytest.raises(ExecutorDied):
        harness.engine.step()
    harness.executor.close()

    assert not harness.thread._thread.is_alive()
    assert list(harness.control.aborted) == []


def test_an_abort_that_raises_does_not_keep_the_engine_from_being_shut_down(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=40))
    harness.round(1)

    def broken(_self: object) -> None:
        raise AssertionError("The executor is not set for this result.")

    monkeypatch.setattr(fake_module("executor.result").RequestOutput, "abort", broken)
    harness.executor.close()

    assert harness.control.shutdown_threads == ("trtllm shutdown",)
    assert not harness.view().is_alive


def test_a_hung_shutdown_is_abandoned_after_its_timeout(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build(
        fake={"shutdown_s": 10 * TEST_TIMEOUT_S},
        is_free=True,  # the bound is in real time
        watch={"shutdown_timeout_s": 0.05},
    )
    begun = signal_shutdown(monkeypatch)
    thread = harness.thread._thread
    harness.executor.close()

    assert begun.wait(TEST_TIMEOUT_S)
    assert harness.view().is_alive, "it still hangs"
    assert not thread.is_alive()


def test_close_returns_although_the_loop_is_blocked(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.executor.trtllm.engine._STOP_S", 0.05)
    harness = build(
        fake={"shutdown_s": 10 * TEST_TIMEOUT_S},
        is_free=True,
        watch={"shutdown_timeout_s": 0.05},
    )
    begun = signal_shutdown(monkeypatch)
    harness.control.pause()
    harness.submit(greedy_spec(1))
    harness.turn()
    harness.control.inject("fatal")
    assert begun.wait(TEST_TIMEOUT_S)
    harness.executor.close()

    assert harness.thread._thread.is_alive(), "it still hangs"
    harness.control.release()
    harness.thread._thread.join(TEST_TIMEOUT_S)
    assert not harness.thread._thread.is_alive()


def test_only_blocking_calls_run_outside_the_event_loop(
    tmp_path: Path, fake_trtllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second loop would lose wake-ups, and a build on the loop would block all its other work."""
    threads: dict[str, set[str]] = {}

    def note(name: str) -> Any:
        def around(original: Any, *arguments: Any, **keywords: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return original(*arguments, **keywords)

        return around

    llm_class = fake_module("llmapi.llm").LLM
    wrapped(monkeypatch, llm_class, "__init__", note("build"))
    for name in ("generate_async", "get_stats_async", "_check_health", "shutdown"):
        wrapped(monkeypatch, llm_class, name, note(name))
    result_class = fake_module("executor.result").RequestOutput
    for name in ("abort", "__anext__"):
        wrapped(monkeypatch, result_class, name, note(name))
    harness = TrtllmHarness(tmp_path)
    harness.submit(greedy_spec(1, max_tokens=40), greedy_spec(2, max_tokens=3))
    harness.round(2)
    harness.engine.cancel(1)
    harness.run_until_idle()
    harness.pass_loop_time(HEALTH_INTERVAL_S)
    harness.submit(greedy_spec(3, max_tokens=40))
    harness.round(2)
    assert harness.finish(2) is FinishReason.LENGTH
    harness.executor.close()

    on_loop = {"generate_async", "get_stats_async", "_check_health", "abort", "__anext__"}
    assert threads == {
        "build": {"trtllm build"},
        "shutdown": {"trtllm shutdown"},
        **{name: {"trtllm loop"} for name in on_loop},
    }
