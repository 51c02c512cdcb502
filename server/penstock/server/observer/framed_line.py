"""One connection of the observer, to an engine or from a front: bytes to frames and back.

Owns the socket's life as asyncio tells it. Does not know what frames mean.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from penstock.server.link.wire import FrameBuffer, LinkError

log = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 1024 * 1024


class FramedLine(asyncio.Protocol):
    """`on_frame` may raise LinkError: the connection ends. `on_closed` comes once."""

    def __init__(
        self,
        name: str,
        *,
        on_frame: "Callable[[FramedLine, int, bytes], None]",
        on_closed: "Callable[[FramedLine], None]",
        on_open: "Callable[[FramedLine], None] | None" = None,
    ) -> None:
        self.name = name
        self.closed = asyncio.Event()
        self._frames = FrameBuffer()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None

    def itself(self) -> "FramedLine":
        """The protocol factory that asyncio asks for."""
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is there."""
        # uvloop's transports are no instances of asyncio's class, only like it.
        self._transport = cast(asyncio.Transport, transport)
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        try:
            for kind, body in self._frames.feed(data):
                self._on_frame(self, kind, body)
        except LinkError as error:
            log.error("%s broke the protocol: %s", self.name, error)  # noqa: TRY400 (no fault of ours)
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's name)
        """asyncio: the socket is gone, for whatever reason."""
        self._transport = None
        self._on_closed(self)
        self.closed.set()

    def write(self, frame: bytes) -> None:
        """Send one frame. A peer that does not read is hung up on."""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            log.error("%s does not read: hanging up", self.name)
            self.hang_up()
            return
        self._transport.write(frame)

    def hang_up(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()
