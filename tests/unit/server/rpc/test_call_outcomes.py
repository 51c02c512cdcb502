"""How a call ends, which gRPC error an exception becomes, and which outcome and options the call's
record contains.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from penstock.server.front.accounts import Accounts, Outcome, RequestAccount
from penstock.server.front.errors import ErrorReason, Failure, request_error
from penstock.server.front.generation import GenerationSpec, TextInput
from penstock.server.front.live_request import LiveRequest
from penstock.server.observe.request_record import RequestOptions, RequestRecord
from penstock.server.observe.trace_context import NOT_TRACED
from penstock.server.rpc.handlers import (
    CANCELLED,
    AdmittedCall,
    CallAccounts,
    Context,
    HandlerWrapper,
    OtherRequestFailed,
    call_timeout_s,
    outcome_of,
    outcome_of_failure,
)
from penstock.server.rpc.statuses import Trailers
from penstock.server.security.rights import ANONYMOUS
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2, prompt_pb2
from support.record_log import RecordLog


class FakeContext:
    """A call context whose `abort` records its arguments and raises `outcome`."""

    def __init__(self, outcome: type[Exception] = grpc.aio.AbortError) -> None:
        self.outcome = outcome
        self.aborts: list[tuple[grpc.StatusCode, str]] = []
        self.trailers: dict[str, str | bytes] = {}

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Trailers) -> NoReturn:
        self.aborts.append((code, details))
        self.trailers = dict(trailers)
        raise self.outcome


class ClientDisconnected(grpc.aio.BaseError):
    """Raised by a blocked write whose client has disconnected."""


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
    is_reported = bool(context.aborts) and context.outcome is grpc.aio.AbortError
    assert isinstance(caught.value, grpc.aio.AbortError) is is_reported
    await asyncio.wait_for(wrapper.wait_until_idle(), 60)
    return wrapper, num_bugs


@pytest.mark.parametrize(
    "error",
    [
        request_error(ErrorReason.QUEUE_FULL),
        OtherRequestFailed(Failure(reason=ErrorReason.QUEUE_FULL), "r"),
    ],
)
async def test_domain_errors_become_statuses(error: Exception) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(error, context)
    assert context.aborts == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")]
    assert num_bugs == 0


@pytest.mark.parametrize(
    ("failure", "reported_ms"),
    [
        (Failure(reason=ErrorReason.QUEUE_FULL), "1100"),
        (Failure(reason=ErrorReason.QUOTA_EXCEEDED, retry_after_s=20.0), "22000"),
        (Failure(reason=ErrorReason.DEADLINE_EXCEEDED, retry_after_s=20.0), "22000"),
        (Failure(reason=ErrorReason.DEADLINE_EXCEEDED), None),
    ],
)
async def test_the_retry_time_is_spread(failure: Failure, reported_ms: str | None) -> None:
    context = FakeContext()
    await call_with(OtherRequestFailed(failure, "r"), context)
    assert context.trailers.get("grpc-retry-pushback-ms") == reported_ms


async def test_bugs_become_internal_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(ValueError("canary of a prompt"), context)
    assert context.aborts == [(grpc.StatusCode.INTERNAL, "internal error")]
    assert num_bugs == 1
    assert "ValueError" in caplog.text
    assert Path(__file__).name in caplog.text, "the frames are there"
    assert "canary" not in caplog.text


async def test_cancellation_is_not_converted(caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(asyncio.CancelledError(), context)
    assert (context.aborts, num_bugs) == ([], 0)
    assert caplog.text == ""


async def test_vanished_peer_is_a_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()
    _, num_bugs = await call_with(ClientDisconnected(), context)
    assert (context.aborts, num_bugs) == ([], 0)
    assert caplog.text == ""


@pytest.mark.parametrize("outcome", [ClientDisconnected, grpc.aio.InternalError, TimeoutError])
async def test_peer_that_vanishes_before_its_status_is_a_cancellation(
    outcome: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    context = FakeContext(outcome)
    _, num_bugs = await call_with(request_error(ErrorReason.DEADLINE_EXCEEDED), context)
    assert (len(context.aborts), num_bugs) == (1, 0)
    assert caplog.text == ""


def test_the_line_of_a_bug_names_its_request(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = HandlerWrapper(retry_after_s=1.0, on_internal_error=lambda: None, random=lambda: 0.4)
    wrapper.internal_error("Method", ValueError(), request_id="r-1", trace_id=b"\xab" * 16)
    (reported,) = caplog.records
    assert vars(reported)["request_id"] == "r-1"
    assert vars(reported)["trace_id"] == "ab" * 16


def clock(remaining_s: float | None) -> Any:
    """Return a call context with this much time left until its deadline; None if it has no
    deadline.
    """
    return SimpleNamespace(time_remaining=lambda: remaining_s)


def account(timeout_s: float = math.inf) -> RequestAccount:
    made = RequestAccount(method="Generate", peer="", arrival_s=0.0, trace=NOT_TRACED)
    made.call_timeout_s = timeout_s
    return made


DEADLINE = Outcome(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("timeout_s", "remaining_s", "outcome"),
    [
        (math.inf, None, CANCELLED),
        (math.inf, math.inf, CANCELLED),
        (10.0, 5.0, CANCELLED),
        (10.0, 0.0, DEADLINE),
        (10.0, -1.0, DEADLINE),
        # The client's deadline has passed: its timeout was rounded up on the way to us.
        (10.0, 0.09, DEADLINE),
        (10.0, 0.2, CANCELLED),
        (0.1, 0.008, DEADLINE),
    ],
)
def test_a_deadline_is_distinguished_from_a_disconnected_client(
    timeout_s: float, remaining_s: float | None, outcome: Outcome
) -> None:
    assert outcome_of_failure(account(timeout_s), clock(remaining_s)) == outcome


def test_our_own_rejection_precedes_the_clients_deadline() -> None:
    reported = account()
    reported.failure = Failure(reason=ErrorReason.QUEUE_FULL)
    assert outcome_of_failure(reported, clock(None)) == outcome_of(reported.failure)
    failed = account()
    generation = GenerationSpec(prompt=TextInput(text="x"), prompt_path="text_prompt.text")
    failed.request = LiveRequest("r", generation, 0.0)
    failed.request.fail(Failure(reason=ErrorReason.DRAINING), 1.0)
    expected = Outcome(grpc.StatusCode.UNAVAILABLE.value[0], "DRAINING")
    assert outcome_of_failure(failed, clock(-1.0)) == expected


def test_no_deadline_is_an_endless_one() -> None:
    assert call_timeout_s(clock(None)) == math.inf
    assert call_timeout_s(clock(3.0)) == 3.0


ALL = pb.GenerateRequest(
    chat_prompt=prompt_pb2.ChatPrompt(),
    sampling=options_pb2.SamplingOptions(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        frequency_penalty=0.1,
        presence_penalty=-0.3,
        seed=7,
        num_outputs=3,
    ),
    stopping=options_pb2.StoppingOptions(max_tokens=64),
    scheduling=options_pb2.SchedulingOptions(priority=-5),
)
ZEROS = pb.GenerateRequest(
    sampling=options_pb2.SamplingOptions(temperature=0.0, top_k=0, seed=0, num_outputs=0),
    stopping=options_pb2.StoppingOptions(max_tokens=0),
)


def reported(message: pb.GenerateRequest, *, is_stream: bool = True) -> RequestRecord:
    log = RecordLog()
    accounts = Accounts(log.recorder, is_tracing=False, front_id=1, has_content=False)
    front: Any = SimpleNamespace(accounts=accounts, model="tiny", model_names=("tiny", "alias"))
    calls = CallAccounts(front, "service")
    account = accounts.open("service/Generate", arrival_s=1.0)
    calls.describe(account, message, is_stream=is_stream)
    accounts.close(account, Outcome(3, "INVALID_ARGUMENT"), 2.0, is_engine_up=True)
    (record,) = log.records
    return record


def test_every_option_is_passed() -> None:
    assert reported(ALL, is_stream=False).options == RequestOptions(
        is_chat=True,
        is_stream=False,
        num_outputs=3,
        max_tokens=64,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        frequency_penalty=0.1,
        presence_penalty=-0.3,
        seed=7,
        priority=-5,
    )


def test_unset_options_are_distinguished_from_zero() -> None:
    assert reported(pb.GenerateRequest()).options == RequestOptions()
    asked = RequestOptions(num_outputs=0, max_tokens=0, temperature=0.0, top_k=0, seed=0)
    assert reported(ZEROS).options == asked


@pytest.mark.parametrize(("name", "model"), [(None, "tiny"), ("alias", "tiny"), ("canary", "")])
def test_only_the_name_of_a_served_model_is_recorded(name: str | None, model: str) -> None:
    assert reported(pb.GenerateRequest(model=name)).model == model
