"""The engine's own statistics: its limits after the start, its blocks while it runs.

Owns the reading of iteration statistics, for which the engine has had three interfaces. Before
NVIDIA PR #9980 the engine pushes them to an iterator that belongs to the loop and ends after a
pause. Since then they are fetched by RPC: first on the thread of the iterator's caller, one batch
at a time, later without blocking the caller. `get_stats` is the same in both RPC versions, so it is
called on a separate thread, and a slow engine cannot block the loop.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.executor.trtllm.api import Llm
from penstock.executor.trtllm.loop_thread import in_worker

log = logging.getLogger(__name__)

_SILENCE_S: Final = 1.0
"""How long one read waits for an iteration. Must not be 0: the engine's queue raises then."""
_LIMIT_S: Final = 10.0
"""How long a read may take on its thread; a longer read is reported and still awaited."""
_INTERVAL_S: Final = 0.2
"""Time between two fetches; each returns all iterations since the last."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of one iteration. `max_num_active` 0: the engine does not report it."""

    max_num_blocks: int
    free_num_blocks: int
    tokens_per_block: int
    max_num_active: int

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are neither free nor merely cached."""
        return self.max_num_blocks - self.free_num_blocks


def read_stats(raw: Mapping[str, Any] | str) -> EngineStats | None:
    """Read one iteration's statistics; return None if they do not include a KV cache."""
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
    """The only reader of the engine's statistics, on the loop.

    `note` is called with the statistics of every iteration that has some. `is_busy`: whether
    requests are inside the engine, which runs no iterations without requests.
    """

    def __init__(
        self, llm: Llm, note: Callable[[EngineStats], None], is_busy: Callable[[], bool]
    ) -> None:
        self._llm = llm
        self._note = note
        self._is_busy = is_busy
        self._submitted = asyncio.Event()
        self._stopping = asyncio.Event()

    def on_submit(self) -> None:
        """Record that a request was submitted: the engine will run iterations."""
        self._submitted.set()

    def stop(self) -> None:
        """Record that a cancellation follows.

        The cancellation alone may not suffice: until Python 3.12, `asyncio.wait_for`, in which the
        engine's iterator waits, loses a cancellation that arrives together with the awaited result.
        """
        self._stopping.set()

    async def run(self) -> None:
        """Read until cancelled."""
        is_fetched = _is_fetched(self._llm)
        log.info("the engine's statistics are %s", "fetched by RPC" if is_fetched else "pushed")
        read = self._fetch if is_fetched else self._iterate
        while not self._stopping.is_set():
            await self._submitted.wait()
            self._submitted.clear()
            # Statistics of the last iterations may arrive after the end of the last request.
            while await read() or (self._is_busy() and not self._stopping.is_set()):
                pass

    async def _iterate(self) -> int:
        """Read the engine's iterator to its end; return the number of iterations."""
        loop = asyncio.get_running_loop()
        count, began_s = 0, loop.time()
        stats = self._llm.get_stats_async(_SILENCE_S)
        async for raw in stats:
            self._pass_on(raw)
            count += 1
            if self._stopping.is_set():
                return 0
        # A pause ended the iterator. Without this call, only the next submission would restart it.
        revive = getattr(stats, "mark_undone", None)
        if revive is not None:
            revive()
        if loop.time() - began_s < _INTERVAL_S and not count:
            await asyncio.sleep(_INTERVAL_S)
        return count

    async def _fetch(self) -> int:
        """Fetch one batch, on a thread; return the number of iterations in it."""
        fetching = asyncio.ensure_future(
            in_worker(lambda: self._llm.get_stats(_SILENCE_S), "trtllm statistics")
        )
        while not (await asyncio.wait([fetching], timeout=_LIMIT_S))[0]:
            log.warning("the engine's statistics were not returned within %g s", _LIMIT_S)
        batch = fetching.result()
        for raw in batch:
            self._pass_on(raw)
        await asyncio.sleep(_INTERVAL_S)
        return len(batch)

    def _pass_on(self, raw: Mapping[str, Any] | str) -> None:
        stats = read_stats(raw)
        if stats is not None:
            self._note(stats)


def _is_fetched(llm: Llm) -> bool:
    """Return whether `get_stats` is an RPC. There is no public way to detect it."""
    executor: Any = getattr(llm, "_executor", None)
    return getattr(executor, "rpc_client", None) is not None
