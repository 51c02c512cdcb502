"""The observer's connection to the engine: queries live requests, and sends commands that set the
log level or profile the engine.

Unlike a front (gRPC server process), the observer submits no requests and receives no step events.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.scheduler.output_view import OutputView
from penstock.server.ipc.connection import Connection, PendingCalls, PersistentConnection
from penstock.server.ipc.frames import (
    Action,
    Command,
    CommandResult,
    EngineHello,
    Frame,
    ObserverHello,
    ViewAnswer,
    ViewQuery,
    decode,
    encode,
)
from penstock.server.ipc.ports import EngineUnavailable
from penstock.server.ipc.wire import FrameError

_PAUSES_S = (0.05, 1.0)
_MAX_UNSENT_BYTES = 1024 * 1024
_T = TypeVar("_T")


class EngineClient:
    """The observer's client of the engine. All calls must be made on the event loop that called
    `start`.

    `hello` is the first frame from the engine, None while disconnected. It is also passed to
    `on_hello`.
    """

    def __init__(self, path: Path, on_hello: Callable[[EngineHello], None] | None = None) -> None:
        self._on_hello = on_hello
        self.hello: EngineHello | None = None
        self._connection: PersistentConnection[Frame] = PersistentConnection(
            path,
            partial(
                Connection,
                "the engine",
                decode,
                on_frame=self._on_frame,
                max_unsent_bytes=_MAX_UNSENT_BYTES,
            ),
            on_open=lambda opened: opened.write(encode(ObserverHello())),
            on_closed=self._on_closed,
            pauses_s=_PAUSES_S,
        )
        self._view_queries: PendingCalls[tuple[OutputView, ...]] = PendingCalls()
        self._commands: PendingCalls[CommandResult] = PendingCalls()

    async def start(self) -> None:
        """Start connecting, and reconnect after each loss until `close`. Does not wait for the
        engine."""
        self._connection.start()

    async def close(self) -> None:
        """Disconnect from the engine."""
        await self._connection.close()

    async def output_views(self, limit_s: float) -> tuple[OutputView, ...]:
        """Return the state of each output that is queued or running in the engine.

        Raises EngineUnavailable if the engine is down, disconnects, or does not respond within
        `limit_s` seconds.
        """
        return await self._query(
            self._view_queries, lambda ticket: ViewQuery(ticket=ticket), limit_s
        )

    async def command(self, action: Action, limit_s: float) -> CommandResult:
        """Send a command to the engine process and return its result.

        Raises EngineUnavailable if the engine is down, disconnects, or does not respond within
        `limit_s` seconds.
        """
        return await self._query(
            self._commands, lambda ticket: Command(ticket=ticket, action=action), limit_s
        )

    async def _query(
        self, calls: PendingCalls[_T], frame: Callable[[int], Frame], limit_s: float
    ) -> _T:
        connection = self._connection.current
        if connection is None or self.hello is None:
            raise EngineUnavailable("the engine is down")
        write = connection.write
        try:
            async with asyncio.timeout(limit_s):
                return await calls.call(lambda ticket: write(encode(frame(ticket))))
        except TimeoutError:
            raise EngineUnavailable("the engine does not respond") from None

    def _on_frame(self, connection: Connection[Frame], frame: Frame) -> None:
        match frame:
            case EngineHello() as hello:
                connection.is_established = True
                self.hello = hello
                if self._on_hello is not None:
                    self._on_hello(hello)
            case ViewAnswer(ticket=ticket, views=views):
                self._view_queries.resolve(ticket, views)
            case CommandResult() as answer:
                self._commands.resolve(answer.ticket, answer)
            case other:
                raise FrameError(f"unexpected frame from the engine: {type(other).__name__}")

    def _on_closed(self, connection: Connection[Frame]) -> None:
        del connection
        self.hello = None
        gone = EngineUnavailable("the engine disconnected")
        self._view_queries.fail(gone)
        self._commands.fail(gone)
