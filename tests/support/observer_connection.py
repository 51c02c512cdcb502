"""One end of the connection between a front and the observer, for tests that act as that end."""

import asyncio
import socket

from penstock.server.ipc.wire import FrameBuffer
from penstock.server.observe.frames import ObserverFrame, decode, encode
from support.timeout import TEST_TIMEOUT_S


class ObserverConnection:
    """Sends frames, and returns the frames of the other side one by one."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._frames = FrameBuffer()
        self._ready: list[ObserverFrame] = []
        connected.setblocking(False)

    def send(self, frame: ObserverFrame) -> None:
        self.socket.sendall(encode(frame))

    async def next(self) -> ObserverFrame:
        loop = asyncio.get_running_loop()
        while not self._ready:
            data = await asyncio.wait_for(loop.sock_recv(self.socket, 1 << 16), TEST_TIMEOUT_S)
            assert data, "the other side hung up"
            self._ready += [decode(body) for body in self._frames.feed(data)]
        return self._ready.pop(0)
