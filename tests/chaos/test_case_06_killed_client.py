from __future__ import annotations

import signal

from chaos.stream_holder import holder
from support.observation import is_quiet, model_of, observed, until_stats
from support.service import simulated

NUM_STREAMS = 50


async def test_case_06_killed_client_with_fifty_streams() -> None:
    arguments = (*simulated(step_s=0.05), "--fronts", "1", "--max-num-seqs", "64")
    async with (
        observed(*arguments) as (service, operations),
        holder(service.address, NUM_STREAMS) as client,
    ):
        await until_stats(operations, lambda stats: model_of(stats).num_processing == NUM_STREAMS)
        client.send_signal(signal.SIGKILL)
        await client.wait()
        stats = await until_stats(operations, is_quiet)
        model = model_of(stats)
        assert model.totals.num_cancelled == NUM_STREAMS
        assert model.totals.num_failed == 0
        cache = model.cache
        assert cache.num_cached_blocks + cache.num_free_blocks == cache.num_total_blocks
