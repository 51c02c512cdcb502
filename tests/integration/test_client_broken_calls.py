"""Both clients make calls that end abnormally: rejected while the client writes, cancelled in
transit, or too large.
"""

import asyncio
from typing import Any

import grpc
import pytest

from penstock.client import (
    NO_RETRY,
    CallCancelled,
    Finished,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from penstock.client.call_settings import CallSettings
from support.client_adapters import AsyncAdapter, ClientAdapter, FakeTime
from support.scripted_server import (
    ScriptedServer,
    accept_and_send_tokens,
    arrived,
    failing,
    send_tokens_and_wait,
)

NUM_ROUNDS = 20
NUM_REQUESTS = 50


async def error_of(adapter: ClientAdapter, prompt: str) -> PenstockError | None:
    try:
        await adapter.events(prompt)
    except PenstockError as error:
        return error
    return None


async def test_a_call_that_ends_during_writes_is_reported_with_its_status(
    server: ScriptedServer,
) -> None:
    """grpc.aio reports such a call as INTERNAL instead of with the server's status."""
    for _ in range(NUM_ROUNDS):
        server.rejections.extend([(grpc.StatusCode.UNAUTHENTICATED, "who are you")] * NUM_REQUESTS)
        settings = CallSettings(retry=NO_RETRY)
        adapter = AsyncAdapter(server.address, FakeTime(), settings=settings, multiplex=True)

        prompts = (f"prompt {number}" for number in range(NUM_REQUESTS))
        errors = await asyncio.gather(*(error_of(adapter, prompt) for prompt in prompts))

        reported = {str(error) for error in errors if not isinstance(error, Unauthenticated)}
        assert reported == set()
        server.rejections.clear()
        await adapter.close()


@pytest.mark.parametrize("has_reason", [False, True], ids=["bare", "with a reason"])
async def test_a_call_cancelled_in_transit_is_retried(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime, has_reason: bool
) -> None:
    reason = "CANCELLED" if has_reason else ""
    server.scripts.append(failing(grpc.StatusCode.CANCELLED, reason))

    if has_reason:
        with pytest.raises(CallCancelled):
            await adapter.events("Hi")
    else:
        assert isinstance((await adapter.events("Hi"))[-1], Finished)
        assert time.slept_s == [0.5]


async def test_a_call_cancelled_at_every_attempt_is_reported_as_unavailable(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.extend([failing(grpc.StatusCode.CANCELLED, "")] * 3)

    with pytest.raises(Unavailable, match="not this client"):
        await adapter.events("Hi")


async def test_a_call_cancelled_after_its_start_is_reported(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(failing(grpc.StatusCode.CANCELLED, "", after=accept_and_send_tokens))

    with pytest.raises(CallCancelled):
        await adapter.events("Hi")


async def test_a_multiplex_call_cancelled_in_transit_is_retried(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    adapter: ClientAdapter = kind(server.address, time, multiplex=True)
    server.rejections.append((grpc.StatusCode.CANCELLED, ""))

    assert isinstance((await adapter.events("Hi"))[-1], Finished)
    assert time.slept_s == [0.5]
    await adapter.close()


async def test_a_request_that_is_too_large_does_not_affect_others(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    adapter: ClientAdapter = kind(server.address, time, multiplex=True)
    server.scripts.append(send_tokens_and_wait)
    running = asyncio.create_task(adapter.events("first"))
    first = await arrived(server)

    with pytest.raises(ResourceExhausted, match="bytes; the limit is 4194304"):
        await adapter.events("x" * (5 << 20))

    assert time.slept_s == []
    assert isinstance((await adapter.events("second"))[-1], Finished)
    first.cancelled.set()
    assert isinstance((await running)[-1], Finished)
    assert len(server.calls) == 1
    await adapter.close()
