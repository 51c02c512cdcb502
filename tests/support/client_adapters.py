"""The async and the blocking client behind one awaitable interface, so that one test covers both.

The blocking client runs in threads, next to the event loop of the server.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from penstock.client import Client, Event, RetryPolicy, SyncClient, Tokens
from penstock.client.call_settings import CallSettings

POLICY = RetryPolicy(max_attempts=3, initial_backoff_s=1.0, multiplier=2.0, pushback_jitter=0.0)


class FakeTime:
    """A clock that advances only when a client sleeps. `slept_s`: the duration of each sleep,
    seconds.
    """

    def __init__(self) -> None:
        self.now_s = 50.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.now_s += delay_s

    async def sleep_async(self, delay_s: float) -> None:
        self.sleep(delay_s)

    def settings(self) -> CallSettings:
        return CallSettings(retry=POLICY, clock=self, random=lambda: 0.0)


class ClientAdapter:
    """Interface of both adapters: methods of `client` are called by name and awaited."""

    client: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def items(
        self,
        name: str,
        *args: Any,
        into: list[Any] | None = None,
        until: Callable[[list[Any]], bool] = lambda items: False,
        **options: Any,
    ) -> Any:
        """Return the items that the method `name` yields, up to the one after which `until` is
        true. `into`: the list to append them to.
        """
        items = [] if into is None else into

        def is_last(item: Any) -> bool:
            items.append(item)
            return until(items)

        await self.each(is_last, name, *args, **options)
        return items

    async def each(
        self, is_last: Callable[[Any], bool], name: str, *args: Any, **options: Any
    ) -> None:
        """Pass each item that the method `name` yields to `is_last`, until that returns true; then
        close the iterator.
        """
        raise NotImplementedError

    async def events(self, prompt: Any, into: list[Event] | None = None, **options: Any) -> Any:
        return await self.items("generate", prompt, into=into, **options)

    async def text(self, prompt: Any, **options: Any) -> Any:
        return await self.items("generate_text", prompt, **options)

    async def stop_after_output(self, prompt: Any) -> None:
        await self.items("generate", prompt, until=lambda items: isinstance(items[-1], Tokens))

    async def all_of(self, requests: Any, **options: Any) -> Any:
        return await self.call("generate_all", requests, **options)

    async def stop_batch_after(self, requests: Any, num_items: int, **options: Any) -> Any:
        def is_enough(items: list[Any]) -> bool:
            return len(items) == num_items

        return await self.items("generate_many", requests, until=is_enough, **options)

    async def close(self, **options: Any) -> None:
        await self.call("close", **options)


class AsyncCalls(ClientAdapter):
    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, name)(*args, **options)

    async def each(
        self, is_last: Callable[[Any], bool], name: str, *args: Any, **options: Any
    ) -> None:
        async with contextlib.aclosing(getattr(self.client, name)(*args, **options)) as items:
            async for item in items:
                if is_last(item):
                    break


class SyncCalls(ClientAdapter):
    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, name), *args, **options)

    async def each(
        self, is_last: Callable[[Any], bool], name: str, *args: Any, **options: Any
    ) -> None:
        def read() -> None:
            with contextlib.closing(getattr(self.client, name)(*args, **options)) as items:
                for item in items:
                    if is_last(item):
                        break

        await asyncio.to_thread(read)


class AsyncAdapter(AsyncCalls):
    def __init__(self, address: str | Sequence[str], time: FakeTime, **options: Any) -> None:
        given = {"settings": time.settings(), **options}
        self.client = Client(address, sleep=time.sleep_async, **given)


class SyncAdapter(SyncCalls):
    def __init__(self, address: str | Sequence[str], time: FakeTime, **options: Any) -> None:
        given = {"settings": time.settings(), **options}
        self.client = SyncClient(address, sleep=time.sleep, **given)
