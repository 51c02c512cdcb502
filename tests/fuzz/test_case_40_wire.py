"""Case 40: a live service serves or rejects mutated messages of every method; they have no other
effect.
"""

from __future__ import annotations

import os

import grpc

from chaos.attacked_server import attacked_server
from fuzz.wire import WireFuzz

NUM_CALLS = int(os.environ.get("PENSTOCK_FUZZ_CALLS", "2000"))
FAST = '{"is_real_time": true, "cost": {"step_s": 0.0005}}'


async def test_case_40_mutated_messages_are_rejected_and_leave_no_state() -> None:
    fuzz = WireFuzz()
    async with attacked_server("--simulated-config", FAST) as attacked:
        async with attacked.service.channel() as channel:
            await fuzz.run(channel, NUM_CALLS)
        assert fuzz.odd == []
        # Many messages passed the parser, and many were rejected after it.
        assert fuzz.codes[grpc.StatusCode.OK] > NUM_CALLS / 20
        assert fuzz.codes[grpc.StatusCode.INVALID_ARGUMENT] > NUM_CALLS / 5
        await attacked.until_idle()
        assert "INTERNAL" not in "".join(attacked.service.stderr)
