"""The observer's line to the engine: it asks what lives there, and orders logs and profiles.

Owns one connection to the engine's link and its rebirth. It is no front: no requests, no steps.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from penstock.scheduler.live_view import LiveView
from penstock.server.link.frames import ObserverHello, decode, encode
from penstock.server.link.look_frames import Look, LookAnswer, Order, OrderAnswer, OrderVerb
from penstock.server.link.ports import EngineHello, EngineUnavailable
from penstock.server.link.wire import LinkError
from penstock.server.observer.framed_line import FramedLine
from penstock.server.observer.questions import Questions

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 1.0


class EngineLine:
    """Everything happens on the loop that called `start`.

    `hello`: what the engine said of itself; None while there is none. `on_hello` hears it too.
    """

    def __init__(self, path: Path, on_hello: Callable[[EngineHello], None] | None = None) -> None:
        self._on_hello = on_hello
        self.hello: EngineHello | None = None
        self._path = path
        self._line: FramedLine | None = None
        self._looks: Questions[tuple[LiveView, ...]] = Questions()
        self._orders: Questions[OrderAnswer] = Questions()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect, and keep connected until `close`. Does not wait for the engine."""
        self._task = asyncio.create_task(self._keep_connected(), name="engine line")

    async def close(self) -> None:
        """Hang up for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._line is not None:
            self._line.hang_up()

    async def look(self, limit_s: float) -> tuple[LiveView, ...]:
        """Every output that lives in the engine. Raises EngineUnavailable, also past `limit_s`."""
        line = self._open_line()
        ticket, answer = self._looks.ask()
        line.write(encode(Look(ticket=ticket)))
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer") from None

    async def order(self, verb: OrderVerb, argument: str, limit_s: float) -> OrderAnswer:
        """Have the engine's process do something. Raises EngineUnavailable."""
        line = self._open_line()
        ticket, answer = self._orders.ask()
        line.write(encode(Order(ticket=ticket, verb=verb, argument=argument)))
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer") from None

    def _open_line(self) -> FramedLine:
        if self._line is None or self.hello is None:
            raise EngineUnavailable("the engine is down")
        return self._line

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        retry_s = _FIRST_RETRY_S
        while True:
            line = FramedLine("the engine", on_frame=self._on_frame, on_closed=self._on_closed)
            try:
                await loop.create_unix_connection(line.itself, str(self._path))
            except OSError as error:
                log.debug("no engine at %s: %s", self._path, error)
            else:
                self._line = line
                line.write(encode(ObserverHello()))
                await line.closed.wait()
                retry_s = _FIRST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _on_frame(self, line: FramedLine, kind: int, body: bytes) -> None:
        del line
        match decode(kind, body):
            case EngineHello() as hello:
                self.hello = hello
                if self._on_hello is not None:
                    self._on_hello(hello)
            case LookAnswer(ticket=ticket, views=views):
                self._looks.answer(ticket, views)
            case OrderAnswer() as answer:
                self._orders.answer(answer.ticket, answer)
            case other:
                raise LinkError(f"an engine does not send {type(other).__name__} to an observer")

    def _on_closed(self, line: FramedLine) -> None:
        del line
        self._line = self.hello = None
        gone = EngineUnavailable("the engine went away")
        self._looks.fail(gone)
        self._orders.fail(gone)
