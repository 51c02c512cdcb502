"""Messages and metadata beyond the limits are refused, and leave no memory taken."""

from __future__ import annotations

import pytest

from support import attacks
from support.hostile_house import besieged

MAX_GROWTH_MIB = 32


@pytest.mark.parametrize(
    "attack", [attacks.huge_messages, attacks.compression_bomb, attacks.huge_metadata]
)
async def test_case_41_what_is_too_large_is_refused(attack: attacks.Attack) -> None:
    async with besieged() as siege:
        async with siege.probed() as probe:
            await attack(siege.address, 2)
            before_mib = siege.rss_mib()
            seen = await attack(siege.address, 10)
            assert siege.rss_mib() - before_mib < MAX_GROWTH_MIB
        assert seen.statuses == (attacks.RESOURCE_EXHAUSTED,) * seen.num_sent
        assert probe.outcomes
        assert probe.num_errors == 0
        await siege.until_calm()
