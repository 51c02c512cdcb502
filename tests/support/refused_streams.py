"""An HTTP/2 server that refuses every stream, as a server does above its limit of streams.

Owns the few frames that takes (RFC 9113): settings out, their acknowledgement, and RST_STREAM with
REFUSED_STREAM for each HEADERS. A gRPC server shows this only when streams race its first settings.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING = 0x1, 0x3, 0x4, 0x6
_ACK = 0x1
_REFUSED_STREAM = 0x7


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    head = struct.pack(">BBI", kind, flags, stream_id)
    return len(payload).to_bytes(3, "big") + head + payload


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(len(_PREFACE))
    writer.write(_frame(_SETTINGS, 0, 0))
    while True:
        head = await reader.readexactly(9)
        kind, flags, stream_id = struct.unpack(">BBI", head[3:])
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            writer.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _HEADERS:
            refusal = _REFUSED_STREAM.to_bytes(4, "big")
            writer.write(_frame(_RST_STREAM, 0, stream_id, refusal))


@contextlib.asynccontextmanager
async def refusing_streams() -> AsyncGenerator[str, None]:
    """Serve on 127.0.0.1 for the length of the block; its address."""

    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                await _refuse(reader, writer)
            finally:
                writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()
