"""Both clients behind one interface, and a clock that only sleeping advances.

The blocking client runs in a thread next to the server's event loop; its adapter has the async
client's interface, so one test covers both.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from penstock.client import Client, Event, RetryPolicy, SyncClient, Tokens
from penstock.client.call_settings import CallSettings
from support.scripted_server import ServedCall, error_info

POLICY = RetryPolicy(max_attempts=3, initial_backoff_s=1.0, multiplier=2.0, pushback_jitter=0.0)


class FakeTime:
    """A clock that only sleeping advances. It records the sleeps in seconds."""

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


class AsyncFace:
    """The async client, unchanged."""

    def __init__(self, address: str | Sequence[str], time: FakeTime, **options: Any) -> None:
        given = {"settings": time.settings(), **options}
        self.client = Client(address, sleep=time.sleep_async, **given)

    async def events(self, prompt: Any, into: list[Event] | None = None, **options: Any) -> Any:
        events = [] if into is None else into
        async for event in self.client.generate(prompt, **options):
            events.append(event)
        return events

    async def text(self, prompt: Any, **options: Any) -> list[str]:
        return [piece async for piece in self.client.generate_text(prompt, **options)]

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, name)(*args, **options)

    async def leave_after_output(self, prompt: Any) -> None:
        async with contextlib.aclosing(self.client.generate(prompt)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break

    async def all_of(self, requests: Any, **options: Any) -> Any:
        return await self.client.generate_all(requests, **options)

    async def leave_batch_after(self, requests: Any, num_items: int, **options: Any) -> list[Any]:
        items: list[Any] = []
        async with contextlib.aclosing(self.client.generate_many(requests, **options)) as batch:
            async for item in batch:
                items.append(item)
                if len(items) == num_items:
                    break
        return items

    async def close(self, **options: Any) -> None:
        await self.client.close(**options)


class SyncFace:
    """The blocking client; each call runs in a thread."""

    def __init__(self, address: str | Sequence[str], time: FakeTime, **options: Any) -> None:
        given = {"settings": time.settings(), **options}
        self.client = SyncClient(address, sleep=time.sleep, **given)

    async def events(self, prompt: Any, into: list[Event] | None = None, **options: Any) -> Any:
        events = [] if into is None else into

        def read() -> list[Event]:
            events.extend(self.client.generate(prompt, **options))
            return events

        return await asyncio.to_thread(read)

    async def text(self, prompt: Any, **options: Any) -> list[str]:
        return await asyncio.to_thread(lambda: list(self.client.generate_text(prompt, **options)))

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, name), *args, **options)

    async def leave_after_output(self, prompt: Any) -> None:
        def leave() -> None:
            for event in self.client.generate(prompt):
                if isinstance(event, Tokens):
                    break

        await asyncio.to_thread(leave)

    async def all_of(self, requests: Any, **options: Any) -> Any:
        return await asyncio.to_thread(self.client.generate_all, requests, **options)

    async def leave_batch_after(self, requests: Any, num_items: int, **options: Any) -> list[Any]:
        def leave() -> list[Any]:
            items: list[Any] = []
            with contextlib.closing(self.client.generate_many(requests, **options)) as batch:
                for item in batch:
                    items.append(item)
                    if len(items) == num_items:
                        break
            return items

        return await asyncio.to_thread(leave)

    async def close(self, **options: Any) -> None:
        await asyncio.to_thread(self.client.close, **options)


Face = AsyncFace | SyncFace


async def until_true(condition: Callable[[], bool]) -> None:
    """Run the event loop until `condition` holds; for changes that no event reports."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def failing(
    code: grpc.StatusCode,
    reason: str,
    *details: Any,
    trailers: tuple[tuple[str, str], ...] = (),
    after: Callable[[ServedCall], Awaitable[None]] | None = None,
) -> Callable[[ServedCall], Awaitable[None]]:
    """Return a script that fails, after running `after` if given. `reason` "": no details."""

    async def script(call: ServedCall) -> None:
        if after is not None:
            await after(call)
        info = (error_info(reason),) if reason else ()
        await call.fail(code, "scripted", *info, *details, trailers=trailers)

    return script


async def accept(call: ServedCall) -> None:
    await call.accepted()


async def accept_and_speak(call: ServedCall) -> None:
    await call.accepted()
    await call.tokens("begun")
