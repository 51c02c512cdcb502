"""Batches of both clients, against a real gRPC server: the order of results, failures, limits on
concurrency and buffering, and cancellation.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from penstock.client import (
    Accepted,
    Client,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    InvalidArgument,
    PoolConfig,
    SyncClient,
    TextPrompt,
    Tokens,
)
from support.client_adapters import AsyncAdapter, ClientAdapter, FakeTime, SyncAdapter
from support.scripted_server import (
    ScriptedServer,
    ServedCall,
    accept_and_send_tokens,
    arrived,
    failing,
    send_tokens_and_wait,
    until,
)


async def echo(call: ServedCall) -> None:
    await call.accepted()
    await call.tokens(call.request.text_prompt.text)
    await call.finished()


async def test_results_are_in_the_order_of_requests(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.extend([echo] * 20)

    results = await adapter.all_of(
        (f"prompt {number}" for number in range(20)), max_concurrency=4, temperature=0.0
    )

    assert [result.text for result in results] == [f"prompt {number}" for number in range(20)]
    assert all(call.request.sampling.HasField("temperature") for call in server.requests)


async def test_the_number_of_concurrent_requests_is_limited(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    num_open = most = 0
    taken = 0

    async def count(call: ServedCall) -> None:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        assert taken <= len(server.requests) + 3, "requests are not fetched before their turn"
        await echo(call)
        num_open -= 1

    def requests() -> Iterator[str]:
        nonlocal taken
        for number in range(30):
            taken += 1
            yield f"prompt {number}"

    server.scripts.extend([count] * 30)
    results = await adapter.all_of(requests(), max_concurrency=3)

    assert [type(result) for result in results] == [Generation] * 30
    # A server's coroutine ends a little after its client has the last message.
    assert most <= 4


async def test_a_failure_is_one_requests_result(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.extend(
        [
            echo,
            failing(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", after=accept_and_send_tokens
            ),
            echo,
        ]
    )
    seen: list[tuple[int, Event]] = []

    results = await adapter.all_of(
        ["a", "b", "c"], max_concurrency=1, on_event=lambda *item: seen.append(item)
    )

    assert [type(result) for result in results] == [Generation, InvalidArgument, Generation]
    assert [index for index, _ in seen] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert isinstance(seen[0][1], Accepted)
    assert isinstance(seen[-1][1], Finished)


async def test_leaving_a_batch_cancels_its_open_requests(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.extend([send_tokens_and_wait] * 3)

    items = await adapter.stop_batch_after(["a", "b", "c", "d"], 6, max_concurrency=3)

    assert adapter.client.pool_state.num_open_calls == 0
    assert {index for index, _ in items} == {0, 1, 2}
    for call in server.requests:
        await until(call.cancelled)
    assert len(server.requests) == 3


async def test_a_callback_that_fails_ends_the_batch(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.extend([send_tokens_and_wait] * 2)

    def reject(index: int, event: Event) -> None:
        if isinstance(event, Tokens):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        await adapter.all_of(["a", "b"], max_concurrency=2, on_event=reject)

    for call in server.requests:
        await until(call.cancelled)


async def test_a_request_that_does_not_fit_ends_the_batch(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(send_tokens_and_wait)

    with pytest.raises(TypeError, match=r"^requests\[1\]: prompt: "):
        await adapter.all_of(["a", [1, "x"]], max_concurrency=2)

    for call in server.requests:
        await until(call.cancelled)


@pytest.mark.parametrize("end", [OSError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
async def test_an_input_iterator_that_raises_ends_the_batch(
    adapter: ClientAdapter, server: ScriptedServer, end: type[BaseException]
) -> None:
    def requests() -> Iterator[str]:
        yield "a"
        raise end

    server.scripts.append(send_tokens_and_wait)

    # Not wait_for: its task would let SystemExit out of the event loop.
    with pytest.raises(end):
        async with asyncio.timeout(60):
            await adapter.all_of(requests(), max_concurrency=2)

    for call in server.requests:
        await until(call.cancelled)


async def test_complete_requests_with_their_options(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    request = GenerationRequest(prompt=TextPrompt(text="a"), request_id="mine")

    (result,) = await adapter.all_of([request], max_concurrency=1)

    assert result.text == "Hello, world"
    assert server.requests[0].request.request_id == "mine"
    with pytest.raises(TypeError, match="options with a GenerationRequest"):
        await adapter.all_of([request], max_concurrency=1, max_tokens=3)


async def test_a_batch_has_the_resume_timeout_of_its_client(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    resumable = type(adapter)(server.address, time, resume_timeout_s=2.5)
    await resumable.all_of(["a"], max_concurrency=1)
    await resumable.close()

    assert server.requests[0].request.resume_timeout.ToMilliseconds() == 2500


async def test_an_empty_batch(adapter: ClientAdapter) -> None:
    assert await adapter.all_of([], max_concurrency=1) == []


async def test_the_pool_bounds_a_batch(server: ScriptedServer, time: FakeTime) -> None:
    pool = PoolConfig(max_concurrent_calls=2, max_waiting_calls=0)
    for kind in (AsyncAdapter, SyncAdapter):
        adapter: ClientAdapter = kind(server.address, time, pool=pool)

        results = await adapter.all_of(["x"] * 12, max_concurrency=50)

        assert {type(result) for result in results} == {Generation}
        await adapter.close()


async def test_sixteen_requests_are_concurrent_by_default(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    sixteen = asyncio.Event()

    async def wait_for_others(call: ServedCall) -> None:
        if len(server.requests) >= 16:
            sixteen.set()
        await until(sixteen)
        await echo(call)

    server.scripts.extend([wait_for_others] * 20)

    results = await adapter.all_of(["x"] * 20)

    assert [type(result) for result in results] == [Generation] * 20


@pytest.mark.parametrize("kind", [Client, SyncClient])
def test_bad_batches_are_rejected_at_once(kind: type[Client] | type[SyncClient]) -> None:
    client = kind()

    with pytest.raises(ValueError, match=r"^max_concurrency:"):
        client.generate_many(["a"], max_concurrency=0)
    with pytest.raises(TypeError, match=r"^requests:"):
        client.generate_many("one prompt", max_concurrency=1)


async def test_a_slow_consumer_stops_the_streams(server: ScriptedServer, time: FakeTime) -> None:
    """The client buffers a bounded number of events, however many the server has to send."""
    num_sent = 0

    async def flood(call: ServedCall) -> None:
        nonlocal num_sent
        await call.accepted()
        for _ in range(5000):
            await call.tokens("x" * 1000)
            num_sent += 1
        await call.finished()

    server.scripts.append(flood)
    adapter = AsyncAdapter(server.address, time)
    batch = adapter.client.generate_many(["a"], max_concurrency=1)
    await anext(batch)
    previous = -1
    # The transport's buffers fill, and then the server waits.
    while previous != num_sent:
        previous = num_sent
        await asyncio.wait_for(adapter.client.health(), 60)

    assert num_sent < 5000
    assert sum([1 async for _ in batch]) == 5001
    await adapter.close()


async def test_an_asynchronous_input_iterator(server: ScriptedServer, time: FakeTime) -> None:
    async def requests() -> AsyncIterator[str]:
        for number in range(5):
            await asyncio.sleep(0)
            yield f"prompt {number}"

    server.scripts.extend([echo] * 5)
    adapter = AsyncAdapter(server.address, time)

    results = await adapter.client.generate_all(requests(), max_concurrency=2)

    assert [result.text for result in results if isinstance(result, Generation)] == [
        f"prompt {number}" for number in range(5)
    ]
    await adapter.close()


async def test_cancelling_the_task_cancels_the_batch(
    server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.extend([send_tokens_and_wait] * 2)
    adapter = AsyncAdapter(server.address, time)
    running = asyncio.create_task(adapter.all_of(["a", "b"], max_concurrency=2))
    calls = [await arrived(server) for _ in range(2)]

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    for call in calls:
        await until(call.cancelled)
    await adapter.close()
