"""Runs checks one after the other, with a time limit for each and one for all together.

Converts the exceptions of checks to outcomes and one-line reasons.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc

from penstock.client import PenstockError
from penstock.server.cli.connection import describe_error
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckFailed,
    CheckOutcome,
    CheckResult,
    CheckSkipped,
)
from penstock.tools.verify.crash_detector import CrashDetector
from penstock.tools.verify.subject import Subject


async def run_checks(
    subject: Subject,
    checks: Sequence[Check],
    *,
    timeout_s: float,
    left_out: frozenset[str],
    on_result: Callable[[CheckResult], None],
    clock: Callable[[], float] = time.monotonic,
    crash_detector: CrashDetector | None = None,
) -> list[CheckResult]:
    """Run the checks; return the results in order. `on_result` is called with each result.
    `left_out`: names of checks that are skipped.

    Checks that are not done within `timeout_s`, the limit for all together, fail. With
    `crash_detector`, a crash of the engine fails the current check, and the next check waits for
    the replacement; without a replacement, the remaining checks fail.
    """
    ends_s = clock() + timeout_s
    results: list[CheckResult] = []
    if crash_detector is not None:
        await crash_detector.begin()
    for check in checks:
        started_s = clock()
        if check.name in left_out:
            outcome, reason = CheckOutcome.SKIP, "skipped by --skip"
        elif crash_detector is not None and crash_detector.is_lost:
            outcome, reason = CheckOutcome.FAIL, "not run: the engine died and was not replaced"
        else:
            outcome, reason = await _run_one(subject, check, ends_s - started_s)
        duration_s = clock() - started_s
        if crash_detector is not None and check.name not in left_out and not crash_detector.is_lost:
            death = await crash_detector.after_check(ends_s - clock())
            if death:
                seen = f"{outcome.value}, {reason}" if outcome is not CheckOutcome.FAIL else reason
                outcome, reason = CheckOutcome.FAIL, f"during {check.name} {death}: {seen}"
        result = CheckResult(name=check.name, outcome=outcome, reason=reason, duration_s=duration_s)
        results.append(result)
        on_result(result)
    return results


async def _run_one(subject: Subject, check: Check, left_s: float) -> tuple[CheckOutcome, str]:
    if left_s <= 0:
        return CheckOutcome.FAIL, "not run: the time limit --timeout-s was reached"
    if check.needs_model and subject.found_model is None:
        return CheckOutcome.SKIP, "the model's limits and features are not known"
    if check.feature is not None and not subject.offers(check.feature):
        return CheckOutcome.SKIP, f"the model does not offer {check.feature}"
    time_s = min(check.timeout_s, left_s)
    try:
        async with asyncio.timeout(time_s):
            return CheckOutcome.PASS, await check.run(subject)
    except CheckSkipped as skipped:
        return CheckOutcome.SKIP, str(skipped)
    except (
        CheckFailed,
        TimeoutError,
        PenstockError,
        grpc.RpcError,
        ValueError,
        TypeError,
    ) as error:
        return CheckOutcome.FAIL, _failure_reason(error, time_s)


def _failure_reason(error: Exception, time_s: float) -> str:
    """Format the error as one line."""
    if isinstance(error, TimeoutError):
        return f"not done after {time_s:.0f} s"
    if isinstance(error, PenstockError):
        return describe_error(error)
    if isinstance(error, grpc.aio.AioRpcError):
        return f"the call failed with {error.code().name}: {error.details()}"
    if isinstance(error, ValueError | TypeError):
        # The client validates requests before sending, so this is a bug in the check.
        return f"{type(error).__name__}: {error}"
    return str(error)
