"""Each error reason of the contract has a client exception: a subclass of its status's exception,
or that exception itself if both have the same name.

The tests also check the errors' text, details, retry times and pickling.
"""

import pickle
import re
from pathlib import Path

import grpc
import grpc.aio
import pytest

import penstock.v1 as pb
from google.rpc import error_details_pb2
from penstock.client import (
    DeadlineExceeded,
    DeadlineUnreachable,
    ExceedsKVCache,
    Internal,
    InvalidArgument,
    PenstockError,
    QueueFull,
    ResourceExhausted,
    StreamBroken,
    Unavailable,
)
from penstock.client.errors import Failure, FieldViolation, error_of
from penstock.client.status import error_from_call
from support.scripted_server import error_info, retry_info, status_trailer

PROTO = Path(pb.__file__).with_name("error.proto").read_text(encoding="utf-8")
# A status after `//`, then the reason, and no other reason between the two.
_REASON = r"// ([A-Z_]+)\.(?:(?!\n  ERROR_).)*\n  ERROR_REASON_([A-Z_]+) ="
DOCUMENTED: list[tuple[str, str]] = re.findall(_REASON, PROTO, re.DOTALL)


def failed_call(
    code: grpc.StatusCode, message: str, *trailers: tuple[str, str | bytes]
) -> grpc.RpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=message
    )


def test_contract_documents_every_reason() -> None:
    names = set(pb.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}

    assert {f"ERROR_REASON_{reason}" for _, reason in DOCUMENTED} == names


@pytest.mark.parametrize(("status", "reason"), DOCUMENTED)
def test_every_reason_has_its_class_under_its_status(status: str, reason: str) -> None:
    code = grpc.StatusCode[status]
    error = error_of(Failure(code=code, message="m", reason=reason))
    by_status = type(error_of(Failure(code=code, message="m")))

    assert isinstance(error, by_status)
    assert type(error) is not PenstockError
    same_name = reason.replace("_", "").lower() == by_status.__name__.lower()
    assert same_name or type(error) is not by_status


def test_reason_of_another_status_is_not_accepted() -> None:
    error = error_of(Failure(code=grpc.StatusCode.INTERNAL, message="m", reason="QUEUE_FULL"))

    assert type(error) is Internal


def test_unknown_reason_gives_the_class_of_the_status() -> None:
    error = error_of(Failure(code=grpc.StatusCode.UNAVAILABLE, message="m", reason="NEWER"))

    assert type(error) is Unavailable
    assert error.reason == "NEWER"


def test_status_outside_the_table_is_a_plain_error() -> None:
    assert type(error_of(Failure(code=grpc.StatusCode.UNKNOWN, message="m"))) is PenstockError


def test_errors_survive_pickling() -> None:
    error = StreamBroken.with_message("gap", "r-9")

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is StreamBroken
    assert again.failure == error.failure


def test_text_names_status_reason_and_every_field_once() -> None:
    reported = FieldViolation(field="stopping.max_tokens", description="too many")
    unlisted = FieldViolation(field="sampling.top_p", description="must be in (0, 1]")
    failure = Failure(
        code=grpc.StatusCode.INVALID_ARGUMENT,
        message="bad request: stopping.max_tokens: too many (and 20 more)",
        reason="PROMPT_TOO_LONG",
        field_violations=(reported, unlisted),
        metadata={"num_more_violations": "19"},
    )

    text = str(error_of(failure))

    assert text == (
        "INVALID_ARGUMENT (PROMPT_TOO_LONG): bad request: stopping.max_tokens: too many;"
        " sampling.top_p: must be in (0, 1]; and 19 more"
    )


def test_text_names_retry_time_estimate_and_request() -> None:
    failure = Failure(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        message="queue full",
        reason="QUEUE_FULL",
        retry_after_s=2.5,
        request_id="r-1",
        metadata={"estimate_ms": "1750"},
    )

    assert str(error_of(failure)) == (
        "RESOURCE_EXHAUSTED (QUEUE_FULL): queue full; estimated time 1.75 s; retry in 2.5 s"
        " [request r-1]"
    )


def test_text_names_a_reason_that_repeats_the_status_once() -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    failure = Failure(code=code, message="bad request", reason="INVALID_ARGUMENT")
    assert str(error_of(failure)) == "INVALID_ARGUMENT: bad request"


def test_all_details_are_read() -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    bad_request.field_violations.add(field="text_prompt.text", description="too long")
    trailer = status_trailer(
        code,
        "too big",
        error_info("EXCEEDS_KV_CACHE", num_blocks="8"),
        bad_request,
        error_details_pb2.RequestInfo(request_id="r-7"),
        error_details_pb2.DebugInfo(detail="not for us"),
    )

    error = error_from_call(failed_call(code, "too big", trailer))

    assert type(error) is ExceedsKVCache
    assert isinstance(error, InvalidArgument)
    assert error.code is code
    assert error.message == "too big"
    assert error.metadata == {"num_blocks": "8"}
    assert error.field_violations == (
        FieldViolation(field="text_prompt.text", description="too long"),
    )
    assert error.request_id == "r-7"
    assert error.retry_after_s is None


def test_reason_of_another_domain_is_not_ours() -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    foreign = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="proxy.example")

    error = error_from_call(failed_call(code, "m", status_trailer(code, "m", foreign)))

    assert type(error) is ResourceExhausted
    assert error.reason == ""


@pytest.mark.parametrize(
    ("retry_s", "pushback_ms", "expected_s"),
    [(1.5, None, 1.5), (None, "250", 0.25), (1.0, "2000", 2.0), (3.0, "10", 3.0)],
)
def test_longer_of_retry_info_and_pushback_counts(
    retry_s: float | None, pushback_ms: str | None, expected_s: float
) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    details = [error_info("QUEUE_FULL")] + ([retry_info(retry_s)] if retry_s is not None else [])
    trailers: list[tuple[str, str | bytes]] = [status_trailer(code, "m", *details)]
    if pushback_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", pushback_ms))

    error = error_from_call(failed_call(code, "m", *trailers))

    assert type(error) is QueueFull
    assert error.retry_after_s == pytest.approx(expected_s)
    assert not error.failure.is_retry_forbidden


def test_a_rejected_deadline_has_an_estimate() -> None:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    info = error_info("DEADLINE_UNREACHABLE", deadline_ms="500", estimate_ms="2250")
    error = error_from_call(
        failed_call(code, "m", status_trailer(code, "m", info, retry_info(9.0)))
    )

    assert isinstance(error, DeadlineUnreachable)
    assert (error.deadline_s, error.estimate_s, error.retry_after_s) == (0.5, 2.25, 9.0)


@pytest.mark.parametrize("reported", [{}, {"estimate_ms": "soon"}, {"estimate_ms": "-5"}])
def test_an_invalid_estimate_is_ignored(reported: dict[str, str]) -> None:
    failure = Failure(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED, message="m", reason="QUEUE_FULL", metadata=reported
    )
    assert error_of(failure).estimate_s is None


@pytest.mark.parametrize("value", ["-1", "soon"])
def test_negative_or_unreadable_pushback_rejects_retries(value: str) -> None:
    call = failed_call(grpc.StatusCode.UNAVAILABLE, "m", ("grpc-retry-pushback-ms", value))

    assert error_from_call(call).failure.is_retry_forbidden


def test_unreadable_details_do_not_hide_the_status() -> None:
    call = failed_call(
        grpc.StatusCode.DEADLINE_EXCEEDED, "late", ("grpc-status-details-bin", b"\xff\xff")
    )

    error = error_from_call(call, request_id="r-3")

    assert type(error) is DeadlineExceeded
    assert error.message == "late"
    assert error.request_id == "r-3"
