"""The event loop that owns the engine, on a separate thread.

Owns the thread, its loop and calls from other threads. The engine wakes only the loop of the first
request of a batch, so all users of the engine must be on one loop. Long blocking calls (build,
shutdown) run on a worker thread of that loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs an event loop until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, callback: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the loop; do nothing if the loop has stopped."""
        try:
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run on the loop and wait for the result.

        Raises the coroutine's error, or TimeoutError when it takes longer than `timeout_s`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self, timeout_s: float) -> None:
        """End the loop; abandon it if it stays blocked for longer."""
        self.post(self.loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()


async def in_worker(function: Callable[[], T], name: str) -> T:
    """Run a blocking call on a daemon thread, so that it can block neither the loop nor the
    exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():
            set_it()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            reason = error
            post(lambda: future.set_exception(reason))
        else:
            post(lambda: future.set_result(result))

    def post(set_it: Callable[[], None]) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed, and nothing waits for the result
            loop.call_soon_threadsafe(settle, set_it)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
