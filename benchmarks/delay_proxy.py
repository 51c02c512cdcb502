"""Runs a TCP proxy that simulates network delay: each byte arrives half a round trip later.

    python benchmarks/delay_proxy.py TARGET_PORT ROUND_TRIP_S

Listens on a free port of 127.0.0.1, prints it, and forwards to TARGET_PORT on 127.0.0.1. The TCP
handshake is with the proxy and takes no time; to simulate its delay, the first bytes of a new
connection wait for one more round trip. There is no bandwidth limit and no packet loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from typing import cast

import uvloop

from usage import print_usage


class Direction(asyncio.Protocol):
    """One end of a connection; received data is sent on `other` after `delay_s` seconds."""

    def __init__(self, delay_s: float) -> None:
        self.other: Direction | None = None
        self.transport: asyncio.Transport | None = None
        self.opens_at_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._under_way: deque[tuple[float, bytes]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(
            "asyncio.Transport", transport
        )  # uvloop's transports have no common base class

    def data_received(self, data: bytes) -> None:
        self._forward(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._forward(b"")

    def _forward(self, data: bytes) -> None:
        """Forward `data` to the other end of the connection; close that end if `data` is empty."""
        due_s = max(self._loop.time(), self.opens_at_s) + self._delay_s
        self._under_way.append((due_s, data))
        if len(self._under_way) == 1:
            self._loop.call_at(due_s, self._arrive)

    def _arrive(self) -> None:
        now_s = self._loop.time()
        target = None if self.other is None else self.other.transport
        while self._under_way and self._under_way[0][0] <= now_s:
            _, data = self._under_way.popleft()
            if target is None or target.is_closing():
                continue
            if data:
                target.write(data)
            else:
                target.close()
        if self._under_way:
            self._loop.call_at(self._under_way[0][0], self._arrive)


class Accepted(Direction):
    """The client's end of a connection; opens the connection to the target."""

    def __init__(self, delay_s: float, target_port: int) -> None:
        super().__init__(delay_s)
        self._target_port = target_port
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.opens_at_s = self._loop.time() + 2 * self._delay_s
        assert self.transport is not None
        self.transport.pause_reading()
        self._connecting = self._loop.create_task(self._connect(self.transport))

    async def _connect(self, transport: asyncio.Transport) -> None:
        try:
            _, served = await self._loop.create_connection(
                lambda: Direction(self._delay_s), "127.0.0.1", self._target_port
            )
        except OSError:
            transport.close()
            return
        self.other, served.other = served, self
        served.opens_at_s = self.opens_at_s
        with contextlib.suppress(RuntimeError):  # the client has disconnected
            transport.resume_reading()


async def serve(target_port: int, round_trip_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Accepted(round_trip_s / 2, target_port), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=2)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
