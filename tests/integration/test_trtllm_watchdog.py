"""The watchdog detects a silent TensorRT-LLM engine; the clients' cancels and the adapter's own
rejections do not hide it.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.executor.trtllm.error_texts import is_invalid_request
from penstock.executor.trtllm.response_queue import Response
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.executor.trtllm.watchdog import Watchdog
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import FailureReason
from support.core import make_spec
from support.trtllm_engine import RESPONSE_TIMEOUT_S, greedy_spec

TIMEOUT_S = 30.0


def request_of(key: int) -> SubmittedRequest:
    spec = make_spec(key, 4)
    return SubmittedRequest(spec=spec, tokens=spec.prompt_ids, slot=key, num_blocks=1, num_cached=0)


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(timeout_s=TIMEOUT_S, max_failures_in_row=3, now_s=0.0)


def given_up(which: SubmittedRequest) -> Response:
    return Response(which, is_last=True, failure="given up", is_synthetic=True)


def test_cancels_of_impatient_clients_do_not_hide_a_dead_engine(watchdog: Watchdog) -> None:
    for key in range(4):
        each = request_of(key + 1)
        watchdog.expect([each], 7.0 * key)
        assert watchdog.check(7.0 * key + 7.0) == []
        watchdog.remove(each, 7.0 * key + 7.0)
        watchdog.on_responses([given_up(each)], 7.0 * key + 7.0)
    watchdog.expect([request_of(9)], 28.0)

    with pytest.raises(ExecutorDied, match="returned nothing for 35 s"):
        watchdog.check(35.0)


def test_the_watchdog_expects_no_response_without_requests(watchdog: Watchdog) -> None:
    old = request_of(1)
    watchdog.expect([old], 0.0)
    watchdog.remove(old, 1.0)

    assert watchdog.check(1000.0) == []
    new = request_of(2)
    watchdog.expect([new], 1000.0)
    assert watchdog.check(1000.0 + TIMEOUT_S - 1.5) == []


def test_requests_rejected_by_the_adapter_do_not_reset_the_watchdog(watchdog: Watchdog) -> None:
    hanging = request_of(1)
    watchdog.expect([hanging], 0.0)
    for turn in range(1, 4):
        bad = request_of(turn + 1)
        watchdog.expect([bad], 10.0 * turn)
        watchdog.on_responses(
            [Response(bad, is_last=True, failure="no", is_synthetic=True)], 10.0 * turn
        )
        assert watchdog.check(10.0 * turn) == []

    with pytest.raises(ExecutorDied, match="about 1 requests inside"):
        watchdog.check(TIMEOUT_S + 0.1)


def test_a_request_that_the_engine_lost_is_reported_once(watchdog: Watchdog) -> None:
    forgotten, served = request_of(1), request_of(2)
    watchdog.expect([forgotten, served], 0.0)
    lost: list[SubmittedRequest] = []
    for now_s in range(1, 100):
        watchdog.on_responses([Response(served, [5])], float(now_s))
        lost += watchdog.check(float(now_s))

    assert lost == [forgotten]


def test_an_engine_that_fails_every_request_is_dead(watchdog: Watchdog) -> None:
    failing = [request_of(key) for key in range(1, 7)]
    watchdog.expect(failing, 0.0)
    faults = [Response(each, is_last=True, failure="forward failed") for each in failing]

    watchdog.on_responses(faults[:2], 1.0)
    watchdog.on_responses([Response(failing[5], [1])], 1.0)
    watchdog.on_responses(faults[2:4], 1.0)
    rejection = Response(failing[5], is_last=True, failure="no such id", is_rejected=True)
    watchdog.on_responses([rejection], 1.0)
    assert watchdog.check(1.0) == []

    watchdog.on_responses(faults[4:5], 1.0)
    with pytest.raises(ExecutorDied, match="failed 3 requests in a row"):
        watchdog.check(1.0)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2 GiB, which exceeds what is free",
        "KV block index exceeds pool size",
        "failed to compile kernel lora_grouped_gemm: CUDA error",
        "LoRA cache manager internal error",
        "forward failed",
        "regex engine crashed",
    ],
)
def test_faults_of_the_engine_are_not_reported_as_the_clients(message: str) -> None:
    assert not is_invalid_request(message)


class TestOverTheEngine:
    """The watchdog with the executor and the stand-in's engine."""

    def test_a_hang_is_detected_although_clients_cancel_early(self, build: Any) -> None:
        harness = build()
        harness.control.inject("hang")
        died = False
        for key in range(1, 60):
            spec = greedy_spec(key, deadline_s=harness.clock.now_s + 20.0)
            harness.engine.submit((spec,))
            harness.clock.now_s += 7.0
            try:
                harness.turn()
            except ExecutorDied:
                died = True
                break
        harness.control.release()

        assert died
        assert harness.clock.now_s < 3 * RESPONSE_TIMEOUT_S

    def test_a_request_that_the_engine_lost_does_not_affect_others(self, build: Any) -> None:
        harness = build()
        harness.submit(greedy_spec(1, max_tokens=30), greedy_spec(2, max_tokens=30))
        harness.round(2)
        harness.control._engine.active.pop(next(iter(harness.control._engine.active)))
        for _ in range(10):
            harness.clock.now_s += RESPONSE_TIMEOUT_S / 4
            harness.round()

        assert harness.failure(1) is FailureReason.EXECUTOR_REQUEST_FAILED
        assert len(harness.tokens(2)) > 8


def test_slow_constraint_checks_do_not_count_as_an_unresponsive_engine(watchdog: Watchdog) -> None:
    for turn in range(20):
        begun_s = 100.0 * turn
        bad = request_of(turn + 1)
        watchdog.expect([bad], begun_s)
        assert watchdog.check(begun_s + 5.0) == []
        rejection = Response(
            bad,
            is_last=True,
            failure="no",
            is_rejected=True,
            is_constraint_error=True,
            is_synthetic=True,
        )
        watchdog.on_responses([rejection], begun_s + 5.0)
        assert watchdog.check(begun_s + 6.0) == []
