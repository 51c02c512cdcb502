"""Manages the block tables of the running requests: finds cached prefixes, and fills, extends and
frees the tables.

Writes `SlotArrays.block_table` and `num_blocks`, and records how many blocks are reserved. Callers
decide how much a request gets: they pass a number of tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.block_pool import BlockPool
from penstock.scheduler.cache_index import CacheIndex
from penstock.scheduler.cached_blocks import EvictionOrder
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.hit_density import eviction_order_of
from penstock.scheduler.request import Request
from penstock.scheduler.retention import RetentionBudget, retention_budget
from penstock.scheduler.sessions import Sessions, session_key, sessions_of
from penstock.scheduler.slot_arrays import SlotArrays


class KVCache:
    """The block tables of all S slots. `pool`: the blocks, with their reference counts, cached
    content and retention.

    `capacity` int32 [S]: tokens that fit into a slot's blocks. `num_reserved`: blocks reserved at
    admission and not allocated yet, over all slots; `reserved` int32 [S]: the same per slot.
    """

    def __init__(
        self,
        arrays: SlotArrays,
        num_blocks: int,
        sessions: Sessions | None = None,
        order: EvictionOrder | None = None,
        budget: RetentionBudget | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, sessions, order, budget)
        self.block_size = arrays.block_size
        self.capacity: NDArray[np.int32] = np.zeros(arrays.num_slots, dtype=np.int32)
        self.reserved: NDArray[np.int32] = np.zeros(arrays.num_slots, dtype=np.int32)
        self.num_reserved = 0
        self._arrays = arrays

    def enable_cache_index(self) -> CacheIndex:
        """Start to index hashed blocks; return the index. Call it before the first block is
        registered.
        """
        cache_index = self.pool.cache_index = CacheIndex(self.block_size)
        return cache_index

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """Return the cached blocks that the request reuses: the blocks of its longest cached
        prefix.

        At least one token is left to compute. Empty if the request wants prompt log probabilities,
        because they need the whole prompt to be computed.
        """
        if request.spec.sampling.needs_whole_prompt:
            return []
        max_num_blocks = (len(request.tokens) - 1) // self.block_size
        return self.pool.match(request.block_hashes[:max_num_blocks])

    def num_taken(self, matched: Sequence[int], num_tokens: int) -> int:
        """Return how many available blocks a table for `num_tokens` tokens takes if it begins with
        `matched`.
        """
        return self.blocks_for(num_tokens) - len(matched) + self.pool.num_unused(matched)

    def admit(self, slot: int, matched: Sequence[int], num_tokens: int) -> None:
        """Start the block table of a slot with the `matched` blocks; reserve blocks for the rest of
        `num_tokens`. The tokens of `matched` count as computed.
        """
        arrays = self._arrays
        self.pool.share(matched)
        arrays.block_table[slot, : len(matched)] = matched
        arrays.num_blocks[slot] = len(matched)
        arrays.num_computed[slot] = len(matched) * self.block_size
        self.capacity[slot] = len(matched) * self.block_size
        num_reserved = self.blocks_for(num_tokens) - len(matched)
        self.reserved[slot] = num_reserved
        self.num_reserved += num_reserved

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """Return how many blocks a slot still needs to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - int(self._arrays.num_blocks[slot]))

    def extend(self, slot: int, count: int) -> None:
        """Append `count` blocks to the table of a slot; check `pool.num_available` first."""
        arrays = self._arrays
        held = int(arrays.num_blocks[slot])
        arrays.block_table[slot, held : held + count] = self.pool.allocate(count)
        arrays.num_blocks[slot] = held + count
        self.capacity[slot] += count * self.block_size
        kept = min(count, int(self.reserved[slot]))
        self.reserved[slot] -= kept
        self.num_reserved -= kept

    def extend_each(self, slots: NDArray[np.intp]) -> None:
        """Append one block to every table of `slots` intp [k]; check `pool.num_available` first."""
        arrays = self._arrays
        held = arrays.num_blocks[slots]
        arrays.block_table[slots, held] = self.pool.allocate(len(slots))
        arrays.num_blocks[slots] = held + 1
        self.capacity[slots] += self.block_size
        if self.num_reserved:
            kept = np.minimum(self.reserved[slots], 1)
            self.reserved[slots] -= kept
            self.num_reserved -= int(kept.sum())

    def register(self, request: Request, num_tokens: int) -> None:
        """Register the full blocks among the first `num_tokens` computed tokens for reuse.

        No-op for a request without a salt. The request has the digests of its prompt; the digests
        of its output are computed here.
        """
        if not request.spec.hash_salt:
            return
        arrays, slot = self._arrays, request.slot
        # Tokens may extend past the table if several arrived at once.
        num_full = min(num_tokens // self.block_size, int(arrays.num_blocks[slot]))
        digests = request.block_hashes
        if len(digests) < num_full:
            start = len(digests) * self.block_size
            previous = digests[-1] if digests else chain_root(request.spec.hash_salt)
            tokens = arrays.token_ids[slot, start : num_full * self.block_size]
            digests.extend(hash_blocks(tokens, self.block_size, previous))
        first = request.num_registered_blocks
        if first < num_full:
            table = arrays.block_table[slot]
            positions = range(first, num_full)
            self.pool.register_chain(table, digests, positions)
            if self.pool.cache_index is not None:
                tokens = arrays.token_ids[
                    slot, first * self.block_size : num_full * self.block_size
                ]
                self.pool.cache_index.note_registered(
                    request.spec.hash_salt, digests, positions, tokens.tobytes()
                )
            request.num_registered_blocks = num_full

    def forget(self, slot: int) -> None:
        """Remove the digests of the blocks that only this slot uses, so that no other request
        reuses them: their content may be invalid.
        """
        table = self._table(slot)
        self.pool.forget(table[self.pool.ref_counts[table] == 1])

    def renew(self, request: Request, now: float) -> None:
        """Restart the time to live of the request's session, because its next turn was submitted; a
        no-op without a session.
        """
        key = session_key(request.spec)
        if key is not None:
            self.pool.sessions.renew(key, now)

    def hold(self, request: Request, now: float) -> None:
        """Keep the registered blocks of an ending request for its session; a no-op without a
        session.
        """
        key = session_key(request.spec)
        if key is not None:
            turn = request.spec.leader_key or request.spec.key
            self.pool.hold(key, turn, self.pool.match(request.block_hashes), now)

    def free(self, request: Request, now: float) -> None:
        """Release the blocks and reservations of a running request, and apply its retention to the
        blocks.
        """
        slot = request.slot
        spec = request.spec
        self.pool.release(self._table(slot), spec.retention, now, spec.tenant)
        self._arrays.num_blocks[slot] = 0
        self.capacity[slot] = 0
        self.num_reserved -= int(self.reserved[slot])
        self.reserved[slot] = 0

    def num_shared_tokens(self, slot: int) -> int:
        """Return the number of tokens of a slot in blocks that other requests also use."""
        return self.block_size * int(np.count_nonzero(self.pool.ref_counts[self._table(slot)] > 1))

    def num_freed(self, slot: int, matched: Sequence[int]) -> int:
        """Return how many blocks would be freed by releasing this slot: its unshared blocks, except
        the blocks in `matched`, and its reservations.
        """
        table = self._table(slot)
        is_freed = self.pool.ref_counts[table] == 1
        if matched:
            is_freed &= ~np.isin(table, matched)
        return int(np.count_nonzero(is_freed)) + int(self.reserved[slot])

    def _table(self, slot: int) -> NDArray[np.int32]:
        return self._arrays.block_table[slot, : int(self._arrays.num_blocks[slot])]


def cache_of(info: ExecutorInfo, config: SchedulerConfig, arrays: SlotArrays) -> KVCache:
    """Create the cache for the blocks of an executor."""
    return KVCache(
        arrays,
        info.num_blocks,
        sessions_of(config, info),
        eviction_order_of(config, info),
        retention_budget(config, info.num_blocks),
    )
