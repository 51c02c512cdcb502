"""What the engine tells of itself: its limits after the start, its pages while it runs.

Owns the reading of iteration statistics. They lag, stop when nothing runs and end by themselves;
unread ones pile up in the engine, so one task reads them all and keeps the last. Runs on the loop.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.executor.trtllm.api import Llm

_SILENCE_S = 3600.0
"""After so long without an iteration the engine's iterator ends; only a new request revives it.

With the usual two seconds it often ends between a request's submission and its first iteration, and
nobody would hear of that request's iterations, nor of any other's, until the next one comes.
"""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One iteration. `max_num_active` 0 where the engine does not tell."""

    max_num_blocks: int
    free_num_blocks: int
    tokens_per_block: int
    max_num_active: int

    @property
    def num_used_blocks(self) -> int:
        """Pages that are neither free nor merely cached."""
        return self.max_num_blocks - self.free_num_blocks


def read_stats(stats: Mapping[str, Any]) -> EngineStats | None:
    """One iteration's statistics; None when they do not tell of a KV cache."""
    cache: Mapping[str, Any] = stats.get("kvCacheStats") or {}
    free_num_blocks = cache.get("freeNumBlocks")
    if free_num_blocks is None or not cache.get("maxNumBlocks") or not cache.get("tokensPerBlock"):
        return None
    return EngineStats(
        max_num_blocks=int(cache["maxNumBlocks"]),
        free_num_blocks=int(free_num_blocks),
        tokens_per_block=int(cache["tokensPerBlock"]),
        max_num_active=int(stats.get("maxNumActiveRequests") or 0),
    )


class StatsPoller:
    """The only reader of the engine's statistics. `note` hears of every iteration that tells."""

    def __init__(self, llm: Llm, note: Callable[[EngineStats], None]) -> None:
        self._llm = llm
        self._note = note
        self._submitted = asyncio.Event()
        self._stopping = asyncio.Event()

    def on_submit(self) -> None:
        """A request went in: there will be iterations to hear of."""
        self._submitted.set()

    def stop(self) -> None:
        """Say that a cancellation follows.

        It may not be enough by itself: until Python 3.12 `asyncio.wait_for`, on which the engine's
        iterator waits, forgets one that comes together with what it waits for.
        """
        self._stopping.set()

    async def run(self) -> None:
        """Read until cancelled."""
        while not self._stopping.is_set():
            await self._submitted.wait()
            self._submitted.clear()
            async for raw in self._llm.get_stats_async(_SILENCE_S):
                stats = read_stats(raw)
                if stats is not None:
                    self._note(stats)
                if self._stopping.is_set():
                    return
