"""Reads the engine's iteration statistics: they contain its limits and its number of free KV cache
blocks.

Versions before NVIDIA PR #9980 push the statistics to an asynchronous iterator; the iterator ends
after a pause. Later versions fetch the statistics by RPC. In some later versions the iterator
blocks its caller, so with RPC the blocking method `get_stats` is called on a worker thread instead.
There, a slow engine cannot block the event loop.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.executor.trtllm.api import Llm
from penstock.executor.trtllm.loop_thread import in_worker

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S: Final = 1.0
"""How long one read waits for statistics, seconds. With 0, the read would raise if there are none.
"""
_WARNING_INTERVAL_S: Final = 10.0
"""Interval, in seconds, of warnings while `get_stats` does not return; it is still awaited."""
_INTERVAL_S: Final = 0.2
"""Seconds between two fetches; each fetch returns all iterations since the last one."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of one iteration: numbers of all and of free KV cache blocks, tokens per block,
    and the maximum number of active requests (0: not reported).
    """

    max_num_blocks: int
    free_num_blocks: int
    tokens_per_block: int
    max_num_active: int

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that requests use; blocks that are only cached count as free."""
        return self.max_num_blocks - self.free_num_blocks


def read_stats(raw: Mapping[str, Any] | str) -> EngineStats | None:
    """Convert one iteration's statistics, a mapping or its JSON; return None if they do not include
    the KV cache.
    """
    stats: Mapping[str, Any] = json.loads(raw) if isinstance(raw, str) else raw
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
    """Reads the engine's statistics; an engine must have only one reader.

    Pushed statistics are read on the event loop; statistics fetched by RPC are read on a worker
    thread.

    `on_stats` is called on the event loop for every iteration whose statistics include the KV
    cache. `is_busy` returns whether requests are inside the engine; without requests, the engine
    runs no iterations.
    """

    def __init__(
        self, llm: Llm, on_stats: Callable[[EngineStats], None], is_busy: Callable[[], bool]
    ) -> None:
        self._llm = llm
        self._on_stats = on_stats
        self._is_busy = is_busy
        self._submitted = asyncio.Event()
        self._stopping = asyncio.Event()

    def on_submit(self) -> None:
        """Resume reading: a request was submitted or is about to be, so the engine will run
        iterations.
        """
        self._submitted.set()

    def stop(self) -> None:
        """Make `run` end after its current read. Then cancel the task of `run`, because `run` may
        be waiting for a submission, and `stop` does not end that wait.

        A cancellation without `stop` may not suffice: before Python 3.12, `asyncio.wait_for`, in
        which the engine's iterator waits, loses a cancellation that arrives together with the
        awaited result.
        """
        self._stopping.set()

    async def run(self) -> None:
        """Read the engine's statistics until `stop` is called during a read, or until cancelled."""
        is_fetched = _is_fetched(self._llm)
        logger.info("the engine's statistics are %s", "fetched by RPC" if is_fetched else "pushed")
        read = self._fetch if is_fetched else self._iterate
        while not self._stopping.is_set():
            await self._submitted.wait()
            self._submitted.clear()
            # Statistics of the last iterations may arrive after the end of the last request.
            while await read() or (self._is_busy() and not self._stopping.is_set()):
                pass

    async def _iterate(self) -> int:
        """Read the engine's iterator until it ends after a pause; return the number of iterations
        read, 0 after `stop`.
        """
        loop = asyncio.get_running_loop()
        count, began_s = 0, loop.time()
        stats = self._llm.get_stats_async(_READ_TIMEOUT_S)
        async for raw in stats:
            self._forward(raw)
            count += 1
            if self._stopping.is_set():
                return 0
        # The iterator ended because of a pause. Without this call, only the next submission would
        # restart it.
        revive = getattr(stats, "mark_undone", None)
        if revive is not None:
            revive()
        if loop.time() - began_s < _INTERVAL_S and not count:
            await asyncio.sleep(_INTERVAL_S)
        return count

    async def _fetch(self) -> int:
        """Fetch the statistics of all iterations since the last call, on a thread, then pause for
        0.2 s; return their number.
        """
        fetching = asyncio.ensure_future(
            in_worker(lambda: self._llm.get_stats(_READ_TIMEOUT_S), "trtllm statistics")
        )
        while not (await asyncio.wait([fetching], timeout=_WARNING_INTERVAL_S))[0]:
            logger.warning(
                "the engine's statistics were not returned within %g s", _WARNING_INTERVAL_S
            )
        batch = fetching.result()
        for raw in batch:
            self._forward(raw)
        await asyncio.sleep(_INTERVAL_S)
        return len(batch)

    def _forward(self, raw: Mapping[str, Any] | str) -> None:
        stats = read_stats(raw)
        if stats is not None:
            self._on_stats(stats)


def _is_fetched(llm: Llm) -> bool:
    """Return whether the statistics are fetched by RPC. Only a private attribute shows this."""
    executor: Any = getattr(llm, "_executor", None)
    return getattr(executor, "rpc_client", None) is not None
