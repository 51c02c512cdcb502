"""HTTP/2 frames as bytes, and a connection that sends them, valid or not.

Frames that are received are counted, and the statuses of calls are read. gRPC's client is not used,
because it cannot send invalid frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence

import hpack

from support.timeout import TEST_TIMEOUT_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
INITIAL_WINDOW_SIZE = 4
DEFAULT_WINDOW = 65_535
CANCEL, ENHANCE_YOUR_CALM = 8, 11
_MAX_WRITE_BYTES = 1 << 16


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame without validation."""
    header = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return header + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """Return a SETTINGS frame of (identifier, value) pairs."""
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs)
    return frame(SETTINGS, 0, 0, payload)


def field(name: bytes, value: bytes) -> bytes:
    """Return a header field as a literal that is not indexed."""
    return hpack.Encoder().encode([(name, value, True)], huffman=False)


def headers(stream: int, path: str, *, flags: int = END_HEADERS, extra: bytes = b"") -> bytes:
    """Return the HEADERS frame of a gRPC call; `extra`: further encoded header fields."""
    return frame(HEADERS, flags, stream, call_fields(path) + extra)


def call_fields(path: str, content_type: bytes = b"application/grpc") -> bytes:
    """Return the header fields of a gRPC call."""
    return b"".join(
        field(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", content_type),
        )
    )


def message(stream: int, data: bytes, *, is_compressed: bool = False) -> bytes:
    """Return one gRPC message that ends the stream, as DATA frames of at most 16 KiB."""
    body = bytes((is_compressed,)) + len(data).to_bytes(4, "big") + data
    parts = [body[start : start + 16384] for start in range(0, len(body), 16384)]
    last = len(parts) - 1
    return b"".join(
        frame(DATA, END_STREAM if index == last else 0, stream, part)
        for index, part in enumerate(parts)
    )


def call(stream: int, path: str, data: bytes) -> bytes:
    return headers(stream, path) + message(stream, data)


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


class RawConnection:
    """A connection that sends frames without validating them, and acknowledges SETTINGS and PING
    frames, except the frame kinds in `unacknowledged`.

    `initial_window`: receive window of each stream in bytes; it is never extended. `counts`: number
    of frames received, by kind. `goaway`: code of the last GOAWAY. `statuses`: status codes of
    calls, in the order of their ends. `settings`: settings of the server. `granted`: number of
    bytes by which the server extended send windows, by stream; the connection is stream 0.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        unacknowledged: Collection[int],
    ) -> None:
        self.counts: Counter[int] = Counter()
        self.num_answered_pings = 0
        self._num_settings = 1  # of the preface
        self._num_acknowledged_settings = 0
        self.settings = {INITIAL_WINDOW_SIZE: DEFAULT_WINDOW}
        self.granted: Counter[int] = Counter()
        self.statuses: list[int] = []
        self._decoder = hpack.Decoder()
        self.goaway: int | None = None
        self.goaway_text = b""
        self.is_closed = False
        self._reader, self._writer = reader, writer
        self._acknowledged = {SETTINGS, PING} - set(unacknowledged)
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._read(), name="raw connection")

    @classmethod
    async def opened(
        cls,
        address: str,
        *,
        initial_window: int | None = None,
        unacknowledged: Collection[int] = (),
    ) -> RawConnection:
        """Connect and send the preface."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        pairs = () if initial_window is None else ((INITIAL_WINDOW_SIZE, initial_window),)
        writer.write(PREFACE + settings(*pairs))
        return cls(reader, writer, unacknowledged)

    async def send(self, *parts: bytes) -> None:
        """Send the frames; discard them if the peer has closed the connection."""
        data = b"".join(parts)
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), _MAX_WRITE_BYTES):
                if self.is_closed:
                    return
                self._writer.write(data[start : start + _MAX_WRITE_BYTES])
                await self._writer.drain()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: self.is_closed or is_so())

    async def until_received(self) -> None:
        """Wait until the peer has read all earlier frames, which the answer to a PING shows, or
        until the connection is closed.
        """
        num_before = self.num_answered_pings
        await self.send(frame(PING, 0, 0, b"are you?"))
        await self.until(lambda: self.num_answered_pings > num_before)

    async def until_settled(self) -> None:
        """Wait like `until_received`, but with SETTINGS, because frequent pings are rejected."""
        self._num_settings += 1
        await self.send(settings())
        await self.until(lambda: self._num_acknowledged_settings >= self._num_settings)

    async def until_granted(self, num_bytes: int) -> None:
        """Wait until the server has allowed `num_bytes` in total on the connection."""
        await self.until(lambda: num_bytes <= DEFAULT_WINDOW + self.granted[0])

    async def until_all_answered(self, num: int) -> None:
        await self.until(lambda: len(self.statuses) >= num)

    async def until_answered(self) -> None:
        await self.until(lambda: bool(self.statuses))

    async def until_closed(self) -> None:
        await self.until(lambda: False)

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(header[:3], "big"))
                self._take_window(header[3], int.from_bytes(header[5:], "big"), payload)
                self._take(header[3], header[4], payload)
                async with self._changed:
                    self._changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.is_closed = True
        async with self._changed:
            self._changed.notify_all()

    def _take_window(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            self.granted[stream] += int.from_bytes(payload, "big")
        elif kind == SETTINGS:
            self.settings.update(struct.iter_unpack(">HI", payload))

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        self.counts[kind] += 1
        if kind == GOAWAY:
            self.goaway, self.goaway_text = int.from_bytes(payload[4:8], "big"), payload[8:]
        elif kind == HEADERS:
            # The server pads nothing, sets no priorities and fits its headers in one frame.
            for name, value in self._decoder.decode(payload, raw=True):
                if name == b"grpc-status":
                    self.statuses.append(int(value))
        elif kind == PING and flags & ACK:
            self.num_answered_pings += 1
        elif kind == SETTINGS and flags & ACK:
            self._num_acknowledged_settings += 1
        elif kind in self._acknowledged and not flags & ACK:
            with contextlib.suppress(ConnectionError):
                self._writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))


@contextlib.asynccontextmanager
async def raw_connection(
    address: str, *, initial_window: int | None = None, unacknowledged: Collection[int] = ()
) -> AsyncGenerator[RawConnection]:
    """Open a connection that is closed at the end of the block."""
    connection = await RawConnection.opened(
        address, initial_window=initial_window, unacknowledged=unacknowledged
    )
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def silent_sockets(
    address: str, greetings: Sequence[bytes]
) -> AsyncGenerator[list[SilentSocket]]:
    """Open one connection for each greeting. A connection sends only its greeting."""
    host, _, port = address.rpartition(":")
    sockets: list[SilentSocket] = []
    try:
        for greeting in greetings:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(greeting)
            sockets.append(SilentSocket(reader, writer))
        yield sockets
    finally:
        await _close_all(one.writer for one in sockets)


class SilentSocket:
    """A connection that sends nothing after its greeting. `until_closed` waits until the server
    closes it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def until_closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(4096):
                pass


async def _close_all(writers: Iterable[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
