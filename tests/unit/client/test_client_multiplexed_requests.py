"""The client's state of a Multiplex call: credit, the ends of requests and of the call, and events
of unknown requests.
"""

from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

import penstock.v1 as pb
from penstock.client import (
    CallCancelled,
    Internal,
    MultiplexConfig,
    PenstockError,
    PromptTooLong,
    QueueFull,
    ResourceExhausted,
    StreamBroken,
)
from penstock.client.errors import Failure
from penstock.client.multiplex import MultiplexedRequest, MultiplexedRequests, multiplex_config
from penstock.client.retry import is_transient
from penstock.client.status import error_from_status
from support.scripted_server import error_info, retry_info


def requests_of_call(**config: Any) -> MultiplexedRequests:
    return MultiplexedRequests(MultiplexConfig(**config), opened_at_s=0.0)


def submit(
    calls: MultiplexedRequests, **options: Any
) -> tuple[MultiplexedRequest, pb.MultiplexSubmit]:
    request = pb.GenerateRequest(text_prompt=pb.TextPrompt(text="Hi"))
    given: dict[str, Any] = {"timeout_s": None, "traceparent": None, "wake": lambda: None}
    opened, command = calls.submit(request, **{**given, **options})
    return opened, command.submit


def tokens(opened: MultiplexedRequest, sequence: int, num_tokens: int = 1) -> pb.MultiplexResponse:
    event = pb.GenerateResponse(sequence=sequence, tokens=pb.TokenDelta(num_tokens=num_tokens))
    return pb.MultiplexResponse(events=[pb.MultiplexEvent(key=opened.key, response=event)])


def finished(key: int) -> pb.MultiplexResponse:
    event = pb.GenerateResponse(finished=pb.RequestFinished())
    return pb.MultiplexResponse(events=[pb.MultiplexEvent(key=key, response=event)])


def failed(key: int, code: int, *details: Any) -> pb.MultiplexResponse:
    packed = [AnyMessage() for _ in details]
    for message, detail in zip(packed, details, strict=True):
        message.Pack(detail)
    status = Status(code=code, message="no", details=packed)
    return pb.MultiplexResponse(events=[pb.MultiplexEvent(key=key, error=status)])


def test_keys_are_never_used_twice() -> None:
    calls = requests_of_call()
    first, _ = submit(calls)
    calls.cancel(first)

    assert submit(calls)[0].key != first.key


@given(chunks=st.lists(st.integers(1, 9), max_size=60), window=st.integers(1, 40))
def test_credit_equals_the_tokens_taken_and_is_always_renewed(
    chunks: list[int], window: int
) -> None:
    calls = requests_of_call(window_tokens=window)
    opened, command = submit(calls)
    credit = command.num_credit_tokens
    for sequence, chunk in enumerate(chunks):
        size = min(chunk, credit)
        assert size >= 1, "the server may send nothing although all was taken"
        credit -= size
        calls.receive(tokens(opened, sequence, size))
        assert opened.take() is not None
        topped_up = opened.credit()
        if topped_up is not None:
            credit += topped_up.credit.num_credit_tokens
        assert credit <= window


def test_events_before_a_failure_are_delivered() -> None:
    calls = requests_of_call()
    opened, _ = submit(calls)
    calls.receive(tokens(opened, 0))
    calls.receive(failed(opened.key, 13))

    assert opened.take() is not None
    with pytest.raises(Internal):
        opened.take()
    with pytest.raises(Internal):
        opened.take()


def test_finished_is_the_end() -> None:
    calls = requests_of_call()
    opened, _ = submit(calls)
    calls.receive(finished(opened.key))

    assert calls.num_open == 0
    assert opened.take() is not None
    assert opened.credit() is None
    with pytest.raises(EOFError):
        opened.take()


def test_an_abandoned_request_may_end_once() -> None:
    calls = requests_of_call()
    opened, _ = submit(calls)
    command = calls.cancel(opened)

    assert command is not None
    assert command.cancel.key == opened.key
    assert calls.cancel(opened) is None
    calls.receive(tokens(opened, 0))
    calls.receive(finished(opened.key))
    with pytest.raises(StreamBroken, match=f"request {opened.key}"):
        calls.receive(finished(opened.key))


def test_the_reader_of_an_abandoned_request_gets_an_error() -> None:
    calls = requests_of_call()
    woken: list[bool] = []
    opened, _ = submit(calls, wake=lambda: woken.append(True))
    calls.receive(tokens(opened, 0))
    calls.cancel(opened)

    assert woken == [True, True]
    with pytest.raises(CallCancelled):
        opened.take()


def test_an_end_of_the_call_is_reported_with_each_request_id() -> None:
    calls = requests_of_call()
    named, _ = submit(calls)
    unnamed, _ = submit(calls)
    accepted = pb.GenerateResponse(accepted=pb.RequestAccepted(request_id="r-9"))
    calls.receive(
        pb.MultiplexResponse(events=[pb.MultiplexEvent(key=named.key, response=accepted)])
    )
    named.take()

    calls.end(QueueFull(Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, message="full")))

    for opened, request_id in ((named, "r-9"), (unnamed, "")):
        with pytest.raises(QueueFull) as caught:
            opened.take()
        assert caught.value.request_id == request_id
    assert not calls.can_submit(0.0)


def test_events_of_unknown_type_are_skipped() -> None:
    calls = requests_of_call()
    opened, _ = submit(calls)

    calls.receive(pb.MultiplexResponse(events=[pb.MultiplexEvent(key=opened.key)]))

    assert opened.take() is None
    assert calls.num_open == 1


def test_age_and_draining_close_a_call_for_new_requests() -> None:
    calls = requests_of_call(max_call_age_s=10.0)
    assert calls.can_submit(9.9)
    assert not calls.can_submit(10.0)
    opened, _ = submit(calls)

    calls.receive(failed(opened.key, 14, error_info("DRAINING")))

    assert not calls.can_submit(0.0)
    assert not calls.has_ended


@pytest.mark.parametrize(
    ("timeout_s", "own_s", "sent_ns"),
    [
        (2.0, None, 2 * 10**9),
        (2.0, 1, 10**9),
        (0.5, 1, 5 * 10**8),
        (1e-12, None, 1),
        (None, 3, 3 * 10**9),
    ],
)
def test_the_earlier_deadline_counts(
    timeout_s: float | None, own_s: int | None, sent_ns: int
) -> None:
    request = pb.GenerateRequest()
    if own_s is not None:
        request.scheduling.total_timeout.seconds = own_s
    before = request.SerializeToString()

    _, command = requests_of_call().submit(
        request, timeout_s=timeout_s, traceparent=None, wake=lambda: None
    )

    assert command.submit.generation.scheduling.total_timeout.ToNanoseconds() == sent_ns
    assert request.SerializeToString() == before, "the next attempt has another deadline"


def test_details_of_a_status_are_read_as_those_of_a_call() -> None:
    packed = [AnyMessage(), AnyMessage()]
    packed[0].Pack(error_info("PROMPT_TOO_LONG", num_prompt_tokens="9"))
    packed[1].Pack(retry_info(1.5))
    error = error_from_status(Status(code=3, message="long", details=packed), request_id="r")

    assert isinstance(error, PromptTooLong)
    assert error.metadata == {"num_prompt_tokens": "9"}
    assert (error.retry_after_s, error.request_id, error.message) == (1.5, "r", "long")


@pytest.mark.parametrize("code", [0, 99])
def test_unknown_codes_are_unknown(code: int) -> None:
    error = error_from_status(Status(code=code, message="?"))

    assert type(error) is PenstockError
    assert error.code is grpc.StatusCode.UNKNOWN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_tokens", 0),
        ("window_tokens", 2**21),
        ("max_call_age_s", 0.0),
        ("max_request_bytes", 0),
    ],
)
def test_bad_multiplex_settings_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}:"):
        MultiplexConfig(**{field: value})


def test_true_means_the_defaults() -> None:
    own = MultiplexConfig(window_tokens=3)

    assert multiplex_config(True, max_message_bytes=1 << 30) == MultiplexConfig()
    assert multiplex_config(False, max_message_bytes=1 << 30) is None
    assert multiplex_config(own, max_message_bytes=1 << 30) == own


def test_a_message_beyond_the_limit_of_the_channel_is_too_large() -> None:
    config = multiplex_config(True, max_message_bytes=100)

    assert config is not None
    assert config.max_request_bytes == 100


def test_a_request_that_is_too_large_opens_no_lane() -> None:
    calls = requests_of_call(max_request_bytes=100)
    kept, _ = submit(calls)
    request = pb.GenerateRequest(text_prompt=pb.TextPrompt(text="x" * 100))

    with pytest.raises(ResourceExhausted, match="bytes; the limit is 100") as caught:
        calls.submit(request, timeout_s=None, traceparent=None, wake=lambda: None)

    assert not is_transient(caught.value)
    assert calls.num_open == 1
    calls.receive(finished(kept.key))


def test_no_request_is_submitted_on_a_stopped_call() -> None:
    calls = requests_of_call()
    assert calls.can_submit(0.0)

    calls.stop()

    assert not calls.can_submit(0.0)
