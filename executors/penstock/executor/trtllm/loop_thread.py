"""The event loop that uses the engine, on a separate thread.

Accepts calls from other threads. When a batch of responses is ready, the engine wakes only the
event loop of the batch's first request, so all calls to the engine must be made on one loop.
`in_worker` runs blocking calls, such as the engine's start and shutdown, on daemon threads.
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
        """Schedule a call on the loop from any thread; do nothing if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop; block until it is done and return its result.

        Raises the coroutine's error, or TimeoutError when it takes longer than `timeout_s`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self, timeout_s: float) -> None:
        """Stop the loop and cancel its tasks; wait up to `timeout_s` for the thread to end."""
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
    """Run a blocking call on a daemon thread named `name` and return its result. It blocks neither
    the loop nor the exit of the process; if the caller is cancelled, the call continues.
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits for the result
            loop.call_soon_threadsafe(settle, set_it)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
