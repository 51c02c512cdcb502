"""Computes the prefix hit rate of an optimal cache, an upper bound for every eviction order.

The cache follows Belady's rule (1966): evict the block whose next use is latest; among blocks with
the same next use, the block farthest from the start of its prompt, because a block is useless
without the blocks before it. It uses whole blocks of the trace, caches every prompt on arrival and
uses all memory for the cache, so no real scheduler can have a higher hit rate with the same memory.
LRU is simulated under the same conditions, to separate the effect of optimal eviction from other
losses of a scheduler.
"""

import heapq
import math
from collections.abc import Iterable
from typing import Protocol

from penstock.server.observe.recording.trace import TraceRequest

_Block = tuple[str, int]


class _Cache(Protocol):
    def visit(self, block: _Block, next_visit: float, depth: int) -> bool:
        """Use a block whose next use is at `next_visit`; return whether it was cached.

        `depth`: number of blocks before it in the prompt, the same at every use.
        """
        ...


def optimal_hit_rate(
    trace: Iterable[TraceRequest], *, num_cache_tokens: int, block_size: int
) -> float:
    """Return the prefix hit rate with Belady's eviction, which knows all future requests: the share
    of prompt tokens found in the cache. NaN for an empty trace.

    It is an upper bound of the hit rate of the engine under test with the same cache memory.

    `num_cache_tokens`: size of the cache. `block_size`: block size of the engine under test, in
    tokens. Hits are limited to the whole blocks of this engine that leave at least one prompt token
    to compute.
    """
    requests = list(trace)
    cache = _ForesightedCache(_num_blocks(requests, num_cache_tokens))
    return _hit_rate(requests, cache, block_size)


def least_recent_hit_rate(
    trace: Iterable[TraceRequest], *, num_cache_tokens: int, block_size: int
) -> float:
    """Return the same share as `optimal_hit_rate`, for a least-recently-used cache."""
    requests = list(trace)
    cache = _LeastRecentCache(_num_blocks(requests, num_cache_tokens))
    return _hit_rate(requests, cache, block_size)


def _num_blocks(requests: list[TraceRequest], num_cache_tokens: int) -> int:
    block_tokens = max((r.prefix_block_tokens for r in requests if r.prefix_ids), default=1)
    return max(0, num_cache_tokens // block_tokens)


def _hit_rate(requests: list[TraceRequest], cache: _Cache, block_size: int) -> float:
    visits = _visits(requests)
    num_hit, num_all = 0, 0
    for request in requests:
        num_all += request.num_prompt_tokens
        num_found = 0
        is_unbroken = True
        for depth, prefix_id in enumerate(request.prefix_ids):
            block = (request.tenant, prefix_id)
            visits[block].pop()
            next_visit = visits[block][-1] if visits[block] else math.inf
            is_unbroken = cache.visit(block, next_visit, depth) and is_unbroken
            num_found += is_unbroken
        usable = (request.num_prompt_tokens - 1) // block_size * block_size
        num_hit += min(num_found * request.prefix_block_tokens, usable)
    return num_hit / num_all if num_all else math.nan


def _visits(requests: list[TraceRequest]) -> dict[_Block, list[int]]:
    """Return for each block the indexes of the requests that use it, in descending order."""
    visits: dict[_Block, list[int]] = {}
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        for prefix_id in request.prefix_ids:
            visits.setdefault((request.tenant, prefix_id), []).append(index)
    return visits


class _ForesightedCache:
    """A cache of at most `capacity` blocks. Keeps the blocks with the earliest next use."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next_visit: dict[_Block, float] = {}
        # By next visit, latest first, then by depth, deepest first; an entry that a later visit
        # replaced is skipped.
        self._latest: list[tuple[float, int, _Block]] = []

    def visit(self, block: _Block, next_visit: float, depth: int) -> bool:
        was_there = self._next_visit.pop(block, None) is not None
        if next_visit == math.inf:
            return was_there
        self._next_visit[block] = next_visit
        heapq.heappush(self._latest, (-next_visit, -depth, block))
        if len(self._next_visit) > self._capacity:
            self._evict()
        return was_there

    def _evict(self) -> None:
        while True:
            negative_visit, _, block = heapq.heappop(self._latest)
            if self._next_visit.get(block) == -negative_visit:
                del self._next_visit[block]
                return


class _LeastRecentCache:
    """A cache of at most `capacity` blocks. Keeps the most recently used blocks (LRU)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Ordered by last visit.
        self._blocks: dict[_Block, None] = {}

    def visit(self, block: _Block, next_visit: float, depth: int) -> bool:
        del next_visit, depth
        was_there = block in self._blocks
        if was_there:
            del self._blocks[block]
        self._blocks[block] = None
        if len(self._blocks) > self._capacity:
            del self._blocks[next(iter(self._blocks))]
        return was_there
