"""Case 43: connections that send too little are closed; ordinary clients still connect."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from chaos import attacks
from chaos import raw_http2 as h2
from chaos.attacked_server import attacked_server
from support.service import Stream
from support.timeout import TEST_TIMEOUT_S


async def test_case_43_idle_connections_and_incomplete_handshakes_are_closed() -> None:
    async with attacked_server("--handshake-timeout-s", "5") as attacked:
        async with attacked.probed() as probe:
            seen = await attacks.idle_connections(attacked.address, 1000)
        assert seen.is_cut
        assert probe.outcomes
        assert probe.num_errors == 0
        await attacked.until_idle()


async def test_case_43_settings_that_are_never_acknowledged_end_the_connection() -> None:
    # Until a client acknowledges the settings, it need not respect them, for example the limit of
    # metadata.
    async with (
        attacked_server("--handshake-timeout-s", "0.5") as attacked,
        h2.raw_connection(attacked.address, unacknowledged=[h2.SETTINGS]) as connection,
    ):
        await connection.until_closed()
        assert connection.goaway_text == b"settings_timeout"


@pytest.mark.parametrize(("max_connections", "is_room"), [(20, False), (2000, True)])
async def test_case_43_the_number_of_connections_is_limited(
    max_connections: int, is_room: bool
) -> None:
    options = ("--max-connections", str(max_connections), "--handshake-timeout-s", "60")
    async with attacked_server(*options) as attacked:
        async with h2.silent_sockets(attacked.address, [b""] * 40) as sockets:
            if not is_room:
                async with asyncio.timeout(TEST_TIMEOUT_S):
                    await asyncio.gather(*(one.until_closed() for one in sockets[20:]))
            async with attacked.service.channel() as channel:
                outcome = await Stream(channel, 3).outcome()
                assert outcome is (grpc.StatusCode.OK if is_room else grpc.StatusCode.UNAVAILABLE)
        # Once the server has noticed that they are closed, it accepts others.
        async with attacked.service.channel() as channel:
            await channel_ready(channel)
            assert await Stream(channel, 3).outcome() is grpc.StatusCode.OK


async def channel_ready(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await channel.channel_ready()
