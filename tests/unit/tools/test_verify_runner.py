"""The runner of checks: results, skipped checks, time limits, and the wait for a new engine after
the engine died.
"""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from penstock.client import Client, Failure, HealthStatus, Internal, Model, ModelLimits, ModelState
from penstock.client.model_info import KeepalivePolicy
from penstock.tools.verify.all_checks import ALL_CHECKS
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckFailed,
    CheckOutcome,
    CheckResult,
    CheckSkipped,
)
from penstock.tools.verify.crash_detector import CrashDetector
from penstock.tools.verify.runner import run_checks
from penstock.tools.verify.subject import Subject
from support.core import FakeClock

MODEL = Model(
    name="m",
    aliases=(),
    is_default=True,
    state=ModelState.READY,
    limits=ModelLimits(vocab_size=100, max_total_tokens=80, max_output_tokens=70),
    keepalive=KeepalivePolicy(),
    features=(("seed", True), ("regex", False)),
    adapters=(),
    executor="torch",
    ready_at_s=None,
)


def subject(model: Model | None = MODEL) -> Subject:
    return Subject(client=Client("127.0.0.1:1"), address="", concurrency=2, found_model=model)


async def good(_: Subject) -> str:
    return "good"


async def judged(*checks: Check, model: Model | None = MODEL, **settings: Any) -> list[CheckResult]:
    reported: list[CheckResult] = []
    results = await run_checks(
        subject(model),
        checks,
        timeout_s=settings.get("timeout_s", 60.0),
        left_out=settings.get("left_out", frozenset()),
        on_result=reported.append,
        clock=settings.get("clock", FakeClock(100.0)),
    )
    assert reported == results
    return results


def raising(error: Exception) -> Check:
    async def run(_: Subject) -> str:
        raise error

    return Check(name="raises", run=run)


INTERNAL = Internal(Failure(code=grpc.StatusCode.INTERNAL, message="broke", request_id="r-1"))


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (CheckFailed("bad"), CheckOutcome.FAIL, "bad"),
        (CheckSkipped("none"), CheckOutcome.SKIP, "none"),
        (INTERNAL, CheckOutcome.FAIL, "INTERNAL: broke [request r-1]"),
        (ValueError("n: odd"), CheckOutcome.FAIL, "ValueError: n: odd"),
        (TimeoutError(), CheckOutcome.FAIL, "not done after 60 s"),
    ],
)
async def test_exceptions_become_outcomes(
    error: Exception, outcome: CheckOutcome, reason: str
) -> None:
    [result] = await judged(raising(error))

    assert (result.outcome, result.reason) == (outcome, reason)


async def test_an_internal_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await judged(raising(ZeroDivisionError()))


async def test_a_check_that_hangs_fails_and_the_next_one_runs() -> None:
    async def hang(_: Subject) -> str:
        await asyncio.Event().wait()
        return ""

    results = await judged(
        Check(name="hangs", run=hang, timeout_s=0.01), Check(name="next", run=good)
    )

    assert [result.outcome for result in results] == [CheckOutcome.FAIL, CheckOutcome.PASS]
    assert results[0].reason.startswith("not done after")


async def test_checks_without_time_left_fail() -> None:
    clock = FakeClock(100.0)

    async def slow(_: Subject) -> str:
        clock.now_s += 60
        return "slow"

    results = await judged(
        Check(name="slow", run=slow), Check(name="late", run=good), clock=clock, timeout_s=60.0
    )

    assert [result.outcome for result in results] == [CheckOutcome.PASS, CheckOutcome.FAIL]
    assert results[0].duration_s == 60
    assert "--timeout-s" in results[1].reason


async def test_features_that_are_not_offered_are_skipped() -> None:
    results = await judged(
        *(Check(name=name, run=good, feature=name) for name in ("seed", "regex", "images"))
    )

    assert [result.outcome.value for result in results] == ["PASS", "SKIP", "SKIP"]
    assert results[1].reason == "the model does not offer regex"


async def test_without_a_model_only_some_checks_run() -> None:
    results = await judged(
        Check(name="a", run=good), Check(name="b", run=good, needs_model=False), model=None
    )

    assert [result.outcome.value for result in results] == ["SKIP", "PASS"]


async def test_left_out_checks_are_skipped() -> None:
    [result] = await judged(Check(name="a", run=good), left_out=frozenset({"a"}))

    assert (result.outcome, result.reason) == (CheckOutcome.SKIP, "skipped by --skip")


async def test_lengths_fit_the_context() -> None:
    assert subject().clamp_output_tokens(1) == 1
    assert subject().clamp_output_tokens(1000) == 80 - 64
    assert max(subject().token_prompt(1000, seed="x")) < 100


def test_checks_have_unique_names_and_real_features() -> None:
    from penstock.v1 import model_pb2

    names = [check.name for check in ALL_CHECKS]
    features = {check.feature for check in ALL_CHECKS} - {None}

    assert len(set(names)) == len(names)
    assert features <= {field.name for field in model_pb2.ModelFeatures.DESCRIPTOR.fields}


def test_the_check_unsupported_requests_every_feature() -> None:
    from penstock.scheduler.executor import Feature
    from penstock.tools.verify.endings import FEATURE_OPTIONS

    assert {feature.value for feature in Feature} <= FEATURE_OPTIONS.keys()


class FakeClient:
    """A client of a service whose engine may be replaced. Each value of `ready_at_s` is one answer:
    the time at which the engine became ready, or None if no engine serves. The last answer repeats.
    """

    def __init__(self, *ready_at_s: float | None) -> None:
        self._answers = list(ready_at_s)

    async def health(self) -> HealthStatus:
        serves = self._answers[0] is not None
        if not serves:
            self._pass_on()
        return HealthStatus.SERVING if serves else HealthStatus.NOT_SERVING

    async def get_model(self) -> Model:
        return replace(MODEL, ready_at_s=self._pass_on())

    def _pass_on(self) -> float | None:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def watched(*ready_at_s: float | None, num_checks: int = 2) -> list[CheckResult]:
    client: Any = FakeClient(*ready_at_s)
    seen = Subject(client=client, address="", concurrency=2, found_model=MODEL)
    clock = FakeClock(100.0)

    def ticking() -> float:
        clock.now_s += 1.0
        return clock.now_s

    return await run_checks(
        seen,
        [Check(name=f"check-{number}", run=good) for number in range(num_checks)],
        timeout_s=10_000.0,
        left_out=frozenset(),
        on_result=lambda result: None,
        clock=ticking,
        crash_detector=CrashDetector(seen, ticking, poll_s=0.0),
    )


async def test_an_engine_that_does_not_die_changes_no_result() -> None:
    results = await watched(7.0, 7.0, 7.0)

    assert [result.reason for result in results] == ["good", "good"]


async def test_a_new_engine_is_waited_for_and_its_death_reported_once() -> None:
    first, second = await watched(7.0, None, None, None, 9.0, 9.0)

    assert first.outcome is CheckOutcome.FAIL
    assert first.reason.startswith("during check-0 the engine")
    assert first.reason.endswith("PASS, good")
    assert second.outcome is CheckOutcome.PASS


async def test_an_engine_that_does_not_return_is_not_waited_for_twice() -> None:
    first, second, third = await watched(7.0, None, num_checks=3)

    assert "no engine served again within" in first.reason
    assert second.reason == third.reason == "not run: the engine died and was not replaced"


async def test_a_service_that_never_served_is_left_to_the_checks() -> None:
    results = await watched(None)

    assert [result.outcome for result in results] == [CheckOutcome.PASS, CheckOutcome.PASS]
