"""Workers of the real gateway are added and removed, with as little effect on clients
as possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

from gateway.smg import gateway, openai, openai_client
from support.observation import num_completed, observed, until_stats
from support.service import simulated, started
from support.timeout import TEST_TIMEOUT_S

NUM_CALLERS = 4
RETRIES = ("--retry-max-retries", "2")
"""As documented in docs/gateway.md."""
WORKER = (*simulated(), "--gateway", "smg", "--fronts", "1")


async def ask(client: Any, num: int, max_tokens: int = 10) -> int:
    answer: Any = await client.completions.create(
        model="demo", prompt=f"request {num}", max_tokens=max_tokens
    )
    count: int = answer.usage.completion_tokens
    return count


async def test_a_killed_worker_ends_only_its_own_streams() -> None:
    async with contextlib.AsyncExitStack() as stack:
        first, second = await asyncio.gather(
            *(stack.enter_async_context(started(*WORKER)) for _ in range(2))
        )
        made = await stack.enter_async_context(
            gateway(first.address, second.address, arguments=RETRIES)
        )
        client = await stack.enter_async_context(openai_client(made))
        streams = [
            await client.completions.create(
                model="demo", prompt=f"long {num}", max_tokens=300, stream=True
            )
            for num in range(2)
        ]  # round robin: one on each
        for one in streams:
            await anext(aiter(one))

        first.signal(signal.SIGKILL)
        await first.ended()

        ended = await asyncio.gather(*(read_out(one) for one in streams), return_exceptions=True)
        assert sum(isinstance(one, openai().APIError) for one in ended) == 1, ended
        assert sum(one == "length" for one in ended) == 1, ended
        assert [await ask(client, num) for num in range(8)] == [10] * 8


async def read_out(stream: Any) -> str | None:
    reason = None
    async for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
    return reason


async def test_no_request_fails_while_one_worker_drains_and_a_third_joins() -> None:
    async with contextlib.AsyncExitStack() as stack:
        first, second, (third, operations) = await asyncio.gather(
            stack.enter_async_context(started(*WORKER)),
            stack.enter_async_context(started(*WORKER)),
            stack.enter_async_context(observed(*WORKER)),
        )
        made = await stack.enter_async_context(
            gateway(first.address, second.address, arguments=RETRIES)
        )
        client = await stack.enter_async_context(openai_client(made))
        load = Load(client)
        callers = [asyncio.create_task(load.run()) for _ in range(NUM_CALLERS)]
        await load.until(2 * NUM_CALLERS)

        await made.add_worker(third.address)
        await load.until(load.num_done + 2 * NUM_CALLERS)
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        await load.until(load.num_done + 4 * NUM_CALLERS)
        load.is_over = True
        await asyncio.gather(*callers)

        assert load.failures == []
        assert load.num_done >= 8 * NUM_CALLERS
        await until_stats(operations, lambda stats: num_completed(stats) > 0)


class Load:
    """Clients that send the next request as soon as they have a response."""

    def __init__(self, client: Any) -> None:
        self.num_done = 0
        self.failures: list[Exception] = []
        self.is_over = False
        self._client = client
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        while not self.is_over:
            try:
                assert await ask(self._client, self.num_done) == 10
            except openai().APIError as error:
                self.failures.append(error)
            async with self._changed:
                self.num_done += 1
                self._changed.notify_all()

    async def until(self, num: int) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: self.num_done >= num)
