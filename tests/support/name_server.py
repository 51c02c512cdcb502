"""A name server that states what the test states: the addresses behind a name, which may change.

Owns as much of RFC 1035 as resolvers of A records ask for. One name, whatever it is; no other kind
of record.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
from collections.abc import AsyncGenerator
from typing import cast

_HEADER = struct.Struct("!6H")
_A, _INTERNET = 1, 1
_ANSWER = 0x8580
"""An answer, with authority, recursion asked for and there, no error."""
_NAME_ABOVE = 0xC00C
"""A pointer to the question's name, right after the header."""


class NameServer(asyncio.DatagramProtocol):
    """`addresses`: what is answered from now on. `num_questions`: for A records, so far."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.num_questions = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of that class in every release of Python.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        question_id, _, num_questions, *_ = _HEADER.unpack_from(data)
        end = data.index(b"\0", _HEADER.size) + 1
        (kind,) = struct.unpack_from("!H", data, end)
        records = b""
        found: list[str] = []
        if num_questions == 1 and kind == _A:
            self.num_questions += 1
            found = self.addresses
            records = b"".join(
                struct.pack("!3HIH", _NAME_ABOVE, _A, _INTERNET, 0, 4)
                + ipaddress.IPv4Address(address).packed
                for address in found
            )
        header = _HEADER.pack(question_id, _ANSWER, 1, len(found), 0, 0)
        assert self._transport is not None
        self._transport.sendto(header + data[_HEADER.size : end + 4] + records, addr)


@contextlib.asynccontextmanager
async def name_server(*addresses: str) -> AsyncGenerator[NameServer]:
    """One on a separate port, at `address`."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(*addresses), local_addr=("127.0.0.1", 0)
    )
    server.address = "{}:{}".format(*transport.get_extra_info("sockname"))
    try:
        yield server
    finally:
        transport.close()
