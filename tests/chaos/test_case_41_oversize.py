"""Case 41: messages and metadata beyond the limits are rejected, and their memory is freed."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import attacks
from chaos.attacked_server import AttackedServer, attacked_server
from penstock.server.rpc.options import MAX_MESSAGE_BYTES
from support.security_files import SecurityFiles

MAX_GROWTH_MIB = 32
NUM_HALF = 200
"""Number of incomplete messages; their declared sizes add up to 800 MiB."""
MAX_HALF_MIB = 160
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.mark.parametrize(
    "attack", [attacks.huge_messages, attacks.compression_bomb, attacks.huge_metadata]
)
async def test_case_41_oversized_messages_are_rejected(attack: attacks.Attack) -> None:
    async with attacked_server() as attacked:
        async with attacked.probed() as probe:
            await attack(attacked.address, 2)
            before_mib = attacked.rss_mib()
            seen = await attack(attacked.address, 10)
            assert attacked.rss_mib() - before_mib < MAX_GROWTH_MIB
        assert seen.statuses == (attacks.RESOURCE_EXHAUSTED,) * seen.num_sent
        assert probe.outcomes
        assert probe.num_errors == 0
        await attacked.until_idle()


async def most_mib_while(attacked: AttackedServer, path: str, *, extra: bytes = b"") -> float:
    """Send messages without their last octet; return by how many MiB the memory of the front grows
    at most.

    Checks that other requests are served meanwhile.
    """
    before_mib = attacked.rss_mib()
    peak_mib = before_mib
    async with attacks.half_sent_calls(attacked.address, path, NUM_HALF, extra=extra):
        async with attacked.probed() as probe:
            while len(probe.outcomes) < 10:
                peak_mib = max(peak_mib, attacked.rss_mib())
                await attacked.until(lambda _: True)
        assert probe.num_errors == 0
    await attacked.until_idle()
    return peak_mib - before_mib


@pytest.mark.parametrize("path", [attacks.GENERATE, attacks.ONCE, HEALTH])
async def test_case_41_incomplete_messages_take_little_memory(path: str) -> None:
    async with attacked_server() as attacked:
        assert await most_mib_while(attacked, path) < MAX_HALF_MIB


async def test_case_41_messages_of_unauthenticated_callers_are_not_buffered(tmp_path: Path) -> None:
    security_files = SecurityFiles(tmp_path)
    security_files.tokens()
    async with attacked_server("--policy-file", str(security_files.policy_file)) as attacked:
        for path in (attacks.GENERATE, "/grpc.channelz.v1.Channelz/GetServers"):
            async with attacks.half_sent_calls(attacked.address, path, NUM_HALF) as connection:
                # Each call is rejected because of its headers, before its message is read.
                await connection.until_all_answered(NUM_HALF)
                assert set(connection.statuses) == {attacks.UNAUTHENTICATED}
                assert connection.granted[0] < 4 * MAX_MESSAGE_BYTES
