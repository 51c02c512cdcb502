"""A TCP relay between client and server whose connections the test can cut.

It forwards bytes without parsing them.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator


class CutRelay:
    """Relays connections to `target` (HOST:PORT), and cuts all of them on request. `num_bytes`:
    number of bytes received from targets.

    `cut_after`: the relay cuts its connections itself once it has received more than this number of
    bytes from targets since the last cut; None: never.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.num_bytes = 0
        self.num_cuts = 0
        self.cut_after: int | None = None
        self._last_cut = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Break every connection in both directions at once."""
        self.num_cuts += 1
        self._last_cut = self.num_bytes
        writers, self._writers = self._writers, set()
        for writer in writers:
            transport = writer.transport
            transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        await asyncio.gather(
            self._relay(reader, there_writer, is_answer=False),
            self._relay(there_reader, writer, is_answer=True),
        )

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if is_answer:
                    self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
                after = self.cut_after
                if is_answer and after is not None and self.num_bytes > self._last_cut + after:
                    self.cut()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def cut_relay(target: str) -> AsyncGenerator[CutRelay]:
    relay = CutRelay(target)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield relay
        relay.cut()
