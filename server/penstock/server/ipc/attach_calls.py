"""The calls with which a front (gRPC server process) attaches streams that the engine keeps."""

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from penstock.server.ipc.connection import PendingCalls
from penstock.server.ipc.frames import Attach, Attached
from penstock.server.ipc.ports import AttachListener


class AttachCalls:
    """The attach calls of one port. `write` sends a frame, or raises EngineUnavailable. Pass the
    responses to `pending`.

    One call per stream is pending at a time, because each response contains all events of
    the stream, and many responses would fill the connection.
    """

    def __init__(self, write: Callable[[Attach], None]) -> None:
        self._write = write
        self.pending: PendingCalls[Attached] = PendingCalls()
        # By stream, while a call for the stream is pending or waiting.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def attach(self, name: str, on_attached: AttachListener) -> None:
        """Attach a stream to this front and wait for the response. Several calls for one stream run
        one by one.

        `on_attached` is called with the response, before any later event, even if the caller was
        cancelled meanwhile. Raises EngineUnavailable if no engine is connected, or if the
        connection is lost.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        await lock.acquire()

        def end(call: asyncio.Task[None]) -> None:
            lock.release()
            if not call.cancelled():
                call.exception()  # Marks it as retrieved, because the caller may be gone.

        call = asyncio.create_task(self._attach(name, on_attached), name="attach")
        call.add_done_callback(end)
        await asyncio.shield(call)

    async def _attach(self, name: str, on_attached: AttachListener) -> None:
        await self.pending.call(
            lambda ticket: self._write(Attach(ticket=ticket, name=name)), on_attached
        )
