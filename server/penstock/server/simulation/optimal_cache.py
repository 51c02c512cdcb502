"""The prefix hit rate of a cache that knows the future: what eviction can be held against.

Owns Belady's rule (1966): evict what is needed again last. It works on whole blocks of the trace,
lets every prompt be cached the moment it arrives and gives all of the memory to the cache, so no
real scheduler can do better with the same memory.
"""

import heapq
import math
from collections.abc import Iterable

from penstock.server.simulation.trace import TraceRequest

_Block = tuple[str, int]


def optimal_hit_rate(
    trace: Iterable[TraceRequest], *, num_cache_tokens: int, block_size: int
) -> float:
    """Prompt tokens found in the cache over all prompt tokens; NaN for a trace of none.

    `block_size`: of the engine that this is compared with, whose hits are whole blocks and leave
    one token to compute.
    """
    requests = list(trace)
    visits = _visits(requests)
    block_tokens = max((r.prefix_block_tokens for r in requests if r.prefix_ids), default=1)
    cache = _ForesightedCache(max(0, num_cache_tokens // block_tokens))
    num_hit, num_all = 0, 0
    for request in requests:
        num_all += request.num_prompt_tokens
        num_found = 0
        is_unbroken = True
        for prefix_id in request.prefix_ids:
            block = (request.tenant, prefix_id)
            visits[block].pop()
            next_visit = visits[block][-1] if visits[block] else math.inf
            is_unbroken = cache.visit(block, next_visit) and is_unbroken
            num_found += is_unbroken
        usable = (request.num_prompt_tokens - 1) // block_size * block_size
        num_hit += min(num_found * request.prefix_block_tokens, usable)
    return num_hit / num_all if num_all else math.nan


def _visits(requests: list[TraceRequest]) -> dict[_Block, list[int]]:
    """When each block is asked for, by number of request, last first."""
    visits: dict[_Block, list[int]] = {}
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        for prefix_id in request.prefix_ids:
            visits.setdefault((request.tenant, prefix_id), []).append(index)
    return visits


class _ForesightedCache:
    """At most `capacity` blocks, those that are needed soonest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next_visit: dict[_Block, float] = {}
        # By next visit, latest first; an entry that a later visit replaced is skipped.
        self._latest: list[tuple[float, _Block]] = []

    def visit(self, block: _Block, next_visit: float) -> bool:
        """Ask for a block that is needed again at `next_visit`; whether it was there."""
        was_there = self._next_visit.pop(block, None) is not None
        if next_visit == math.inf:
            return was_there
        self._next_visit[block] = next_visit
        heapq.heappush(self._latest, (-next_visit, block))
        if len(self._next_visit) > self._capacity:
            self._evict()
        return was_there

    def _evict(self) -> None:
        while True:
            negative_visit, block = heapq.heappop(self._latest)
            if self._next_visit.get(block) == -negative_visit:
                del self._next_visit[block]
                return
