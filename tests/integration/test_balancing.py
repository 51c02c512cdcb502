"""Clients balance their calls over three real servers while servers start, stop and die.

Tests the statements of docs/balancing.md. Every server ends its connections after a second, so that
connections are also replaced because of their age in every test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import struct
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import cast

import pytest

from penstock.client import (
    Accepted,
    ChannelConfig,
    Client,
    PenstockError,
    TokenPrompt,
    Tokens,
    Unavailable,
)
from support.cut_relay import cut_relay
from support.ports import reusable_port
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

# Clients without pauses, and the servers that answered them.

PROMPT = TokenPrompt(ids=(5, 6, 7, 8))


class SteadyLoad:
    """Sends requests continuously. `answered`: number of responses by model name, which identifies
    the server; `failures`: all errors.
    """

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.failures: list[PenstockError] = []
        self._changed = asyncio.Condition()

    async def call(self, client: Client) -> None:
        while True:
            try:
                result = await client.generate_once(PROMPT, max_tokens=4, deadline_s=TEST_TIMEOUT_S)
            except PenstockError as error:
                self.failures.append(error)
                assert len(self.failures) < 100, self.failures[0]
            else:
                self.answered[result.accepted.model] += 1
            async with self._changed:
                self._changed.notify_all()

    async def more(self, *names: str, count: int = 10) -> Counter[str]:
        """Wait until each of these servers has answered `count` more requests; return how many
        requests each server answered during the wait.
        """
        before = self.answered.copy()
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            await self._changed.wait_for(
                lambda: all(self.answered[name] >= before[name] + count for name in names)
            )
        return self.answered - before

    async def without(self, name: str, count: int = 30) -> None:
        """Wait until `count` consecutive answers have come from other servers."""
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            while True:
                before = self.answered.copy()
                await self._changed.wait_for(
                    lambda: (self.answered - before).total() >= count  # noqa: B023 (awaited here)
                )
                if self.answered[name] == before[name]:
                    return


@contextlib.asynccontextmanager
async def steady_load(client: Client, num_callers: int = 6) -> AsyncGenerator[SteadyLoad]:
    load = SteadyLoad()
    callers = [asyncio.create_task(load.call(client)) for _ in range(num_callers)]
    try:
        yield load
    finally:
        for caller in callers:
            caller.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
    for outcome in ended:
        assert isinstance(outcome, asyncio.CancelledError), outcome


# A DNS server with scripted addresses, which may change.

_HEADER = struct.Struct("!6H")
_A, _INTERNET = 1, 1
_ANSWER = 0x8580
"""Flags: an authoritative answer, recursion desired and available, no error."""
_NAME_ABOVE = 0xC00C
"""A pointer to the question's name, directly after the header."""


class NameServer(asyncio.DatagramProtocol):
    """A DNS server. `addresses`: the addresses that it returns. `num_questions`: number of queries
    for A records so far.
    """

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.num_questions = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # In some releases of Python it is not an instance of that class.
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
    """Start a name server on a free port; it answers with `addresses`."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(*addresses), local_addr=("127.0.0.1", 0)
    )
    server.address = "{}:{}".format(*transport.get_extra_info("sockname"))
    try:
        yield server
    finally:
        transport.close()


AGE_S = "1"
STEP_S = 0.04
"""Long enough that a call takes about the same time on each server, even on a busy machine."""


class QuickNames(ChannelConfig):
    """A ChannelConfig with which gRPC resolves a name again as soon as a connection ends.

    By default gRPC waits 30 seconds between two queries.
    """

    def options(self, target: str = "") -> tuple[tuple[str, int | str], ...]:
        return (
            *ChannelConfig.options(self, target),
            ("grpc.dns_min_time_between_resolutions_ms", 50),
        )


def server(name: str, *place: str) -> contextlib.AbstractAsyncContextManager[Service]:
    """Start a server whose model is called `name`. `place`: further arguments of `serve`."""
    ages = ("--max-connection-age-s", AGE_S)
    return started(*simulated(STEP_S), "--fronts", "1", "--model-name", name, *ages, *place)


@pytest.fixture
async def stack() -> AsyncGenerator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def three(stack: AsyncExitStack) -> list[Service]:
    return list(await asyncio.gather(*(stack.enter_async_context(server(name)) for name in "abc")))


async def test_a_list_of_servers_with_one_drained_and_one_killed(stack: AsyncExitStack) -> None:
    a, b, c = await three(stack)
    client = await stack.enter_async_context(Client([a.address, b.address, c.address]))
    async with steady_load(client) as load:
        seen = await load.more("a", "b", "c", count=30)
        # Each call goes to the server with the fewest open calls, so loads are similar.
        assert max(seen.values()) < 4 * min(seen.values())

        a.signal(signal.SIGTERM)
        assert await a.ended() == 0
        await load.without("a")
        await load.more("b", "c")
        assert load.failures == []

        # The one on b comes last, so that it cannot end before b is killed.
        on_c = await opened_on(client, "c")
        on_b = await opened_on(client, "b")
        b.process.kill()
        # Only streams that the dead server had begun to send are lost.
        with pytest.raises(Unavailable):
            async for _ in on_b:
                pass
        await load.without("b")
        async for event in on_c:
            if isinstance(event, Tokens):
                break
        await on_c.aclose()
        await load.more("c")
    assert load.failures == []


async def opened_on(client: Client, name: str) -> AsyncGenerator[object]:
    """Start a long generation on this server; return its events after the first token."""
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while True:
            events = client.generate(PROMPT, max_tokens=900, ignore_eos=True)
            accepted = await anext(events)
            assert isinstance(accepted, Accepted)
            if accepted.model == name:
                async for event in events:
                    if isinstance(event, Tokens):
                        return events
            await events.aclose()


async def test_a_name_whose_addresses_change(stack: AsyncExitStack) -> None:
    """The name resolves like a headless Service of Kubernetes: to an address for each ready pod."""
    port = str(reusable_port())
    a = await stack.enter_async_context(server("a", "--host", "127.0.0.1", "--port", port))
    await stack.enter_async_context(server("b", "--host", "127.0.0.2", "--port", port))
    names = await stack.enter_async_context(name_server("127.0.0.1", "127.0.0.2"))
    client = await stack.enter_async_context(
        Client(f"dns://{names.address}/penstock-pods.test:{port}", channel=QuickNames())
    )
    async with steady_load(client) as load:
        await load.more("a", "b")

        await stack.enter_async_context(server("c", "--host", "127.0.0.3", "--port", port))
        num_questions = names.num_questions
        names.addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        # The client was not notified. It asked again because a connection became too old.
        await load.more("a", "b", "c")
        assert names.num_questions > num_questions

        # Kubernetes removes a terminating pod's address first, and then sends the signal.
        names.addresses = ["127.0.0.2", "127.0.0.3"]
        a.signal(signal.SIGTERM)
        assert await a.ended() == 0
        await load.more("b", "c")
    assert load.failures == []


async def test_a_connection_stays_on_its_server_until_its_maximum_age(
    stack: AsyncExitStack,
) -> None:
    """The relay acts like an ordinary Service of Kubernetes, which balances connections, not calls:
    all calls of a connection reach the same server.
    """
    a = await stack.enter_async_context(server("a"))
    new_server = await stack.enter_async_context(server("b"))
    relay = await stack.enter_async_context(cut_relay(a.address))
    client = await stack.enter_async_context(Client(relay.address))
    async with steady_load(client) as load:
        await load.more("a")
        assert load.answered["b"] == 0
        relay.target = new_server.address
        await load.more("b")
        await load.without("a")
    assert load.failures == []
