"""The client rejects invalid arguments with an error that names the argument, the rule and the
value.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.client import (
    ChannelConfig,
    Client,
    GenerationRequest,
    OperationsClient,
    PoolConfig,
    RetryPolicy,
    SyncClient,
    TextPrompt,
)

ADDRESS = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (PoolConfig, {"num_channels": "2"}, "num_channels: must be an int, not str"),
        (PoolConfig, {"num_channels": True}, "num_channels: must be an int, not bool"),
        (PoolConfig, {"num_channels": 0}, "num_channels: must be at least 1, not 0"),
        (PoolConfig, {"max_concurrent_calls": 1.5}, "max_concurrent_calls: must be an int, not"),
        (PoolConfig, {"max_waiting_calls": -1}, "max_waiting_calls: must be at least 0, not -1"),
        (RetryPolicy, {"max_attempts": None}, "max_attempts: must be an int, not NoneType"),
        (RetryPolicy, {"initial_backoff_s": "1"}, "initial_backoff_s: must be a number, not str"),
        (RetryPolicy, {"multiplier": float("inf")}, "multiplier: must be at least 1, not inf"),
        (
            ChannelConfig,
            {"keepalive_s": 5},
            "keepalive_s: must be at least 20 and at most 2,147,483.647, not 5",
        ),
        (ChannelConfig, {"keepalive_timeout_s": 0}, "keepalive_timeout_s: must be above 0 and at"),
        (ChannelConfig, {"max_message_bytes": 1e6}, "max_message_bytes: must be an int, not float"),
        (ChannelConfig, {"service_config": {}}, "service_config: must be str or None, not dict"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(
    kind: Callable[..., object], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(**arguments)

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("metadata", [{"x-tenant": "a"}, "x-tenant", (("x-tenant",),)])
def test_metadata_that_is_no_sequence_of_pairs_is_rejected(metadata: Any) -> None:
    with pytest.raises(TypeError, match="metadata: must be pairs of key and value"):
        Client(ADDRESS, metadata=metadata)


@pytest.mark.parametrize(
    ("resume_timeout_s", "rule"),
    [
        (-1, "must be at least 0, not -1"),
        (float("nan"), "must be at least 0, not nan"),
        ("5", "must be a number, not str"),
    ],
)
def test_a_resume_timeout_that_is_no_time_is_rejected(resume_timeout_s: Any, rule: str) -> None:
    for kind in (Client, SyncClient):
        with pytest.raises((TypeError, ValueError), match=f"^resume_timeout_s: {rule}$"):
            kind(ADDRESS, resume_timeout_s=resume_timeout_s)


async def test_the_resume_timeout_of_a_resumption_is_checked() -> None:
    async with Client(ADDRESS) as client:
        with pytest.raises(ValueError, match=r"^resume_timeout_s: must be at least 0, not -1$"):
            client.resume("r-1", resume_timeout_s=-1)


def test_an_address_of_a_list_that_is_no_text_is_named_by_its_index() -> None:
    addresses: Any = ["a:1", 3]
    with pytest.raises(TypeError, match=r"^address\[1\]: must be str, not int$"):
        Client(addresses)


@pytest.mark.parametrize(
    ("invalid", "error", "message"),
    [
        (3, TypeError, "prompt: must be a str, "),
        ([], ValueError, "prompt: "),
        (
            GenerationRequest(prompt=TextPrompt(text="b")),
            TypeError,
            "options with a GenerationRequest: max_tokens",
        ),
    ],
)
def test_an_invalid_request_of_a_batch_is_named_by_its_index(
    invalid: Any, error: type[Exception], message: str
) -> None:
    with SyncClient(ADDRESS) as client, pytest.raises(error) as caught:
        client.generate_all(
            [invalid],
            max_concurrency=1,
            max_tokens=1,
        )

    assert str(caught.value).startswith(f"requests[0]: {message}")


async def test_an_invalid_option_of_a_batch_is_not_an_error_of_one_request() -> None:
    options: Any = {"max_tokens": "3"}
    async with Client(ADDRESS) as client:
        with pytest.raises(ValueError, match=r"^max_tokens: must be an int"):
            client.generate_many(["a"], max_concurrency=1, **options)


def test_an_address_of_another_type_is_rejected() -> None:
    with pytest.raises(TypeError, match="address: must be str, not int"):
        OperationsClient(50052)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.get_request(3), "request_id: must be a str, not the int 3"),
        (lambda client: client.get_request("a", tenant=3), "tenant: must be a str, not the int 3"),
        (lambda client: client.get_stats("\udcff"), "model: is not valid UTF-8"),
        (lambda client: client.get_stats(deadline_s=-1), "deadline_s: must be above 0, not -1"),
        (lambda client: client.dump_flight_record(3), "model: must be a str, not the int 3"),
        (lambda client: client.list_requests(state="READY"), "state: must be RequestState or None"),
        (lambda client: client.list_requests(max_requests=0), "max_requests: must be at least 1"),
        (lambda client: client.set_log_level("debug"), "level: must be LogLevel, not str"),
        (lambda client: client.profile("engine"), "process: must be ServerProcess, not str"),
        (lambda client: client.profile(duration_s="5"), "duration_s: must be a number, not str"),
        (lambda client: client.drain(timeout_s=-1), "timeout_s: must be at least 0 and at most"),
        (
            lambda client: client.get_flight_record(file_format="raw"),
            "file_format: must be FlightFormat or None, not str",
        ),
    ],
)
async def test_an_argument_of_an_operators_call_is_named(
    call: Callable[[Any], Awaitable[object]], message: str
) -> None:
    async with OperationsClient(ADDRESS) as client:
        with pytest.raises((TypeError, ValueError)) as caught:
            await call(client)

    assert str(caught.value).startswith(message)
