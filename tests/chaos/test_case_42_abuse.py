"""Case 42: malformed HTTP/2 frames on one connection affect no other connection, and leave no state
behind.
"""

from __future__ import annotations

import pytest

from chaos import attacks
from chaos.attacked_server import attacked_server
from penstock.server.rpc.options import MAX_CONCURRENT_STREAMS

MAX_GROWTH_MIB = 20
"""Maximum growth of a front's memory during attacks. The growth during a first attack does not
count, because freed memory is kept for reuse.
"""
NUM_RESETS, NUM_ATTACKS = 20_000, 5
MAX_BYTES_PER_RESET = 250
"""Maximum memory that grpc.aio keeps for a cancelled stream. On a slow machine, more of the
attack's streams begin before they are cancelled.
"""
FLOODS = (
    attacks.open_and_hang,
    attacks.settings_flood,
    attacks.ping_flood,
    attacks.empty_data,
    attacks.continuation_flood,
    attacks.window_updates,
    attacks.garbage,
    attacks.unknown_fields,
    attacks.bad_frames,
)


async def test_case_42_rapid_resets_affect_no_other_client() -> None:
    async with attacked_server() as attacked:
        await attacks.rapid_reset(attacked.address)
        await attacked.until_idle()
        before_mib = attacked.rss_mib()
        async with attacked.probed() as probe:
            for _ in range(NUM_ATTACKS):
                seen = await attacks.rapid_reset(attacked.address, NUM_RESETS)
                # The limit on streams rejects most calls before a handler runs.
                assert seen.num_resets > seen.num_sent / 2
        assert probe.outcomes
        assert probe.num_errors == 0
        await attacked.until_idle()
        kept_mib = NUM_ATTACKS * NUM_RESETS * MAX_BYTES_PER_RESET / 2**20
        await attacked.until_within(before_mib + MAX_GROWTH_MIB + kept_mib)


async def test_case_42_floods_affect_no_other_client() -> None:
    async with attacked_server() as attacked:
        for attack in FLOODS:
            await attack(attacked.address)
        await attacked.until_idle()
        before_mib = attacked.rss_mib()
        for attack in FLOODS:
            async with attacked.probed() as probe:
                await attack(attacked.address)
            assert probe.outcomes, attack.__name__
            assert probe.num_errors == 0, attack.__name__
            await attacked.until_idle()
        await attacked.until_within(before_mib + MAX_GROWTH_MIB)


async def test_case_42_the_calls_of_a_connection_are_limited() -> None:
    async with attacked_server() as attacked:
        seen = await attacks.open_and_hang(attacked.address, 5000)
        assert seen.num_resets == 5000 - MAX_CONCURRENT_STREAMS
        await attacked.until_idle()


@pytest.mark.parametrize(
    "path",
    [
        attacks.GENERATE,
        attacks.ONCE,
        "/grpc.health.v1.Health/Check",
        "/penstock.v1.GenerationService/Multiplex",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_case_42_a_call_without_a_message_is_ended(path: str) -> None:
    async with attacked_server("--max-arrival-s", "0.5") as attacked:
        seen = await attacks.unfinished_calls(attacked.address, path)
        # Each call gets a status, and its stream is reset although its client has not ended it.
        assert (len(seen.statuses), seen.num_resets) == (seen.num_sent, seen.num_sent)
        assert not seen.is_cut
        await attacked.until_idle()


async def test_case_42_unknown_padding_is_rejected() -> None:
    async with attacked_server() as attacked, attacked.probed() as probe:
        seen = await attacks.unknown_fields(attacked.address)
        assert seen.statuses == (attacks.INVALID_ARGUMENT,) * seen.num_sent
    assert probe.num_errors == 0
