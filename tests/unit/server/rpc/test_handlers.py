"""The translation of our exceptions to gRPC's."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from penstock.server.front.errors import ErrorReason, Refusal, refuse
from penstock.server.rpc.handlers import AdmittedCall, CallFailed, Context, HandlerWrapper
from penstock.server.rpc.statuses import Trailers
from penstock.server.security.rights import ANONYMOUS


class FakeContext:
    """Records how a call was aborted. `abort` raises `outcome`."""

    def __init__(self, outcome: type[Exception] = grpc.aio.AbortError) -> None:
        self.outcome = outcome
        self.aborts: list[tuple[grpc.StatusCode, str]] = []
        self.trailers: dict[str, str | bytes] = {}

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Trailers) -> NoReturn:
        self.aborts.append((code, details))
        self.trailers = dict(trailers)
        raise self.outcome


class Vanished(grpc.aio.BaseError):
    """The error of a blocked write whose peer is gone."""


async def call_with(error: BaseException, context: FakeContext) -> tuple[HandlerWrapper, int]:
    num_bugs = 0

    def count() -> None:
        nonlocal num_bugs
        num_bugs += 1

    wrapper = HandlerWrapper(retry_after_s=1.0, on_internal_error=count, random=lambda: 0.4)

    async def handler(data: bytes, context: Context) -> bytes:
        raise error

    method: Any = wrapper.unary("Method", handler)
    with pytest.raises((grpc.aio.AbortError, asyncio.CancelledError)) as caught:
        await method.unary_unary(AdmittedCall(b"", ANONYMOUS), context)
    is_told = bool(context.aborts) and context.outcome is grpc.aio.AbortError
    assert isinstance(caught.value, grpc.aio.AbortError) is is_told
    await asyncio.wait_for(wrapper.wait_until_idle(), 60)
    return wrapper, num_bugs


@pytest.mark.parametrize(
    "error",
    [
        refuse(ErrorReason.QUEUE_FULL),
        CallFailed(Refusal(reason=ErrorReason.QUEUE_FULL), "r"),
    ],
)
async def test_domain_errors_become_statuses(error: Exception) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(error, context)
    assert context.aborts == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")]
    assert num_bugs == 0


@pytest.mark.parametrize(
    ("refusal", "told_ms"),
    [
        (Refusal(reason=ErrorReason.QUEUE_FULL), "1100"),
        (Refusal(reason=ErrorReason.QUOTA_EXCEEDED, retry_after_s=20.0), "22000"),
        (Refusal(reason=ErrorReason.DEADLINE_EXCEEDED, retry_after_s=20.0), "22000"),
        (Refusal(reason=ErrorReason.DEADLINE_EXCEEDED), None),
    ],
)
async def test_the_time_to_come_back_is_drawn_out(refusal: Refusal, told_ms: str | None) -> None:
    context = FakeContext()
    await call_with(CallFailed(refusal, "r"), context)
    assert context.trailers.get("grpc-retry-pushback-ms") == told_ms


async def test_bugs_become_internal_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(ValueError("canary of a prompt"), context)
    assert context.aborts == [(grpc.StatusCode.INTERNAL, "internal error")]
    assert num_bugs == 1
    assert "ValueError" in caplog.text
    assert "test_handlers.py" in caplog.text, "the frames are there"
    assert "canary" not in caplog.text


async def test_cancellation_goes_through(caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(asyncio.CancelledError(), context)
    assert (context.aborts, num_bugs) == ([], 0)
    assert caplog.text == ""


async def test_vanished_peer_is_a_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(Vanished(), context)
    assert (context.aborts, num_bugs) == ([], 0)
    assert caplog.text == ""


@pytest.mark.parametrize("outcome", [Vanished, grpc.aio.InternalError, TimeoutError])
async def test_peer_that_vanishes_before_its_status_is_a_cancellation(
    outcome: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    context = FakeContext(outcome)
    _, num_bugs = await call_with(refuse(ErrorReason.DEADLINE_EXCEEDED), context)
    assert (len(context.aborts), num_bugs) == (1, 0)
    assert caplog.text == ""


def test_the_line_of_a_bug_names_its_request(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = HandlerWrapper(retry_after_s=1.0, on_internal_error=lambda: None, random=lambda: 0.4)
    wrapper.internal_error("Method", ValueError(), request_id="r-1", trace_id=b"\xab" * 16)
    (told,) = caplog.records
    assert vars(told)["request_id"] == "r-1"
    assert vars(told)["trace_id"] == "ab" * 16
