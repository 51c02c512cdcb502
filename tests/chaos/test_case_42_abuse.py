"""Case 42: malformed HTTP/2 frames on one connection affect no other connection and
leave no state.
"""

from __future__ import annotations

import pytest

from chaos import attacks
from chaos.attacked_server import besieged
from penstock.server.rpc.options import MAX_CONCURRENT_STREAMS

MAX_GROWTH_MIB = 20
"""Measured on a front that saw the attack before: memory kept for reuse is no leak."""
NUM_RESETS, NUM_ATTACKS = 20_000, 5
MAX_BYTES_PER_RESET = 250
"""Memory that grpc.aio keeps for a cancelled stream; a slow machine rejects fewer of them
unseen.
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
    async with besieged() as siege:
        await attacks.rapid_reset(siege.address)
        await siege.until_calm()
        before_mib = siege.rss_mib()
        async with siege.probed() as probe:
            for _ in range(NUM_ATTACKS):
                seen = await attacks.rapid_reset(siege.address, NUM_RESETS)
                # Most are rejected by the bound on streams, unseen by any handler.
                assert seen.num_resets > seen.num_sent / 2
        assert probe.outcomes
        assert probe.num_errors == 0
        await siege.until_calm()
        kept_mib = NUM_ATTACKS * NUM_RESETS * MAX_BYTES_PER_RESET / 2**20
        await siege.until_within(before_mib + MAX_GROWTH_MIB + kept_mib)


async def test_case_42_floods_affect_no_other_client() -> None:
    async with besieged() as siege:
        for attack in FLOODS:
            await attack(siege.address)
        await siege.until_calm()
        before_mib = siege.rss_mib()
        for attack in FLOODS:
            async with siege.probed() as probe:
                await attack(siege.address)
            assert probe.outcomes, attack.__name__
            assert probe.num_errors == 0, attack.__name__
            await siege.until_calm()
        await siege.until_within(before_mib + MAX_GROWTH_MIB)


async def test_case_42_the_calls_of_a_connection_are_limited() -> None:
    async with besieged() as siege:
        seen = await attacks.open_and_hang(siege.address, 5000)
        assert seen.num_resets == 5000 - MAX_CONCURRENT_STREAMS
        await siege.until_calm()


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
    async with besieged("--max-arrival-s", "0.5") as siege:
        seen = await attacks.unfinished_calls(siege.address, path)
        # Each call gets a status, and its stream is reset although its client has not ended it.
        assert (len(seen.statuses), seen.num_resets) == (seen.num_sent, seen.num_sent)
        assert not seen.is_cut
        await siege.until_calm()


async def test_case_42_unknown_padding_is_rejected() -> None:
    async with besieged() as siege, siege.probed() as probe:
        seen = await attacks.unknown_fields(siege.address)
        assert seen.statuses == (attacks.INVALID_ARGUMENT,) * seen.num_sent
    assert probe.num_errors == 0
