"""Case 6: a client process with fifty streams is killed; the service releases all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from support.observation import model_of, observed, until_stats
from support.service import PATIENCE_S, simulated

TESTS = Path(__file__).resolve().parents[1]
NUM_STREAMS = 50


@contextlib.asynccontextmanager
async def holder(address: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Start a client with fifty running streams; it is gone after the block."""
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.stream_holder", address, str(NUM_STREAMS)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"running\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_case_06_killed_client_with_fifty_streams() -> None:
    arguments = (*simulated(), "--fronts", "1", "--max-num-seqs", "64")
    async with (
        observed(*arguments) as (service, operations),
        holder(service.address) as client,
    ):
        await until_stats(operations, lambda stats: model_of(stats).num_processing == NUM_STREAMS)
        client.send_signal(signal.SIGKILL)
        await client.wait()
        stats = await until_stats(
            operations,
            lambda stats: (
                model_of(stats).num_processing == model_of(stats).num_pending == 0
                and not model_of(stats).cache.num_used_blocks
                and not any(front.num_live_requests for front in stats.fronts)
            ),
        )
        model = model_of(stats)
        assert model.totals.num_cancelled == NUM_STREAMS
        assert model.totals.num_failed == 0
        cache = model.cache
        assert cache.num_cached_blocks + cache.num_free_blocks == cache.num_total_blocks
