"""Rejections because of deadlines, the queue or quotas, from the engine to the client's
exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn

import pytest

from penstock.client import (
    Accepted,
    Client,
    DeadlineExceeded,
    DeadlineUnreachable,
    PenstockError,
    QueueFull,
    QuotaExceeded,
    RetryPolicy,
)
from penstock.scheduler.request import FailureReason
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from support.fronts import ServedFront, queued, serving
from support.timeout import TEST_TIMEOUT_S


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[ServedFront]:
    async with serving(text, FrontConfig(acceptance_delay_s=600.0, retry_after_s=3.0)) as served:
        yield served


async def no_sleep(duration_s: float) -> NoReturn:
    raise AssertionError(f"the call is tried again after {duration_s} s")


async def rejected(
    served: ServedFront, reason: FailureReason, *, is_queued: bool = False, **times_s: float
) -> PenstockError:
    """Return the exception of a client when the engine ends its request with `reason`. `is_queued`:
    the request was accepted first. `times_s`: fields of the engine's event that are times, in
    seconds.
    """
    retry = RetryPolicy(max_attempts=1 if reason is FailureReason.QUEUE_FULL else 4)
    async with Client(served.address, retry=retry, sleep=no_sleep) as client:
        events = client.generate("hello", request_id="r", ttft_timeout_s=0.5, deadline_s=60.0)
        first = asyncio.ensure_future(anext(events))
        (spec,) = await served.port.next_submission()
        if is_queued:
            served.port.emit(changes=[queued(spec.key, 0, 0.1)])
            assert isinstance(await first, Accepted)
        served.port.fail(spec.key, reason, **times_s)
        with pytest.raises(PenstockError) as caught:
            await asyncio.wait_for(anext(events) if is_queued else first, TEST_TIMEOUT_S)
        return caught.value


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize(
    ("reason", "which"),
    [
        (FailureReason.TTFT_DEADLINE_UNREACHABLE, "ttft"),
        (FailureReason.DEADLINE_UNREACHABLE, "grpc"),
    ],
)
async def test_a_deadline_that_cannot_be_met(
    served: ServedFront, reason: FailureReason, which: str, is_queued: bool
) -> None:
    error = await rejected(
        served, reason, is_queued=is_queued, estimate_s=1.75, deadline_s=0.5, retry_after_s=2.0
    )
    assert isinstance(error, DeadlineUnreachable)
    assert (error.estimate_s, error.deadline_s, error.retry_after_s) == (1.75, 0.5, 2.0)
    assert error.request_id == "r"
    assert error.metadata == {
        "deadline": which,
        "deadline_ms": "500",
        "estimate_ms": "1750",
        "state": "PENDING",
        "phase": "queue",
    }


async def test_without_an_estimate_there_is_still_a_retry_time(served: ServedFront) -> None:
    error = await rejected(served, FailureReason.DEADLINE_UNREACHABLE)
    assert isinstance(error, DeadlineUnreachable)
    assert (error.estimate_s, error.deadline_s, error.retry_after_s) == (None, None, 3.0)


async def test_a_deadline_that_passed_has_a_retry_time_if_that_is_known(
    served: ServedFront,
) -> None:
    error = await rejected(served, FailureReason.TTFT_DEADLINE_EXCEEDED, is_queued=True)
    assert (type(error), error.retry_after_s) == (DeadlineExceeded, None)
    error = await rejected(
        served, FailureReason.TTFT_DEADLINE_EXCEEDED, is_queued=True, retry_after_s=7.0
    )
    assert (type(error), error.retry_after_s) == (DeadlineExceeded, 7.0)


async def test_a_full_queue_has_a_retry_time(served: ServedFront) -> None:
    error = await rejected(served, FailureReason.QUEUE_FULL, estimate_s=4.5, retry_after_s=12.0)
    assert isinstance(error, QueueFull)
    assert (error.estimate_s, error.retry_after_s) == (4.5, 12.0)
    error = await rejected(served, FailureReason.QUEUE_FULL)
    assert (error.estimate_s, error.retry_after_s) == (None, 3.0)


async def test_a_request_beyond_the_quota_is_retried_after_the_delay(served: ServedFront) -> None:
    slept_s: list[float] = []

    async def sleep(duration_s: float) -> None:
        slept_s.append(duration_s)

    retry = RetryPolicy(max_attempts=2, pushback_jitter=0.0)
    async with Client(served.address, retry=retry, sleep=sleep) as client:
        events = client.generate("hello")
        first = asyncio.ensure_future(anext(events))
        (spec,) = await served.port.next_submission()
        served.port.fail(spec.key, FailureReason.TENANT_OVER_QUOTA, retry_after_s=6.0)
        (spec,) = await served.port.next_submission()
        assert slept_s == [6.0]
        served.port.fail(spec.key, FailureReason.TENANT_OVER_QUOTA, retry_after_s=8.0)
        with pytest.raises(QuotaExceeded) as caught:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await first
        assert caught.value.retry_after_s == 8.0
