"""The pool of KV cache blocks: reference counts, cached content, eviction.

Owns the state of each block: free, cached (available, content still identified by its hash) or used
(reference count above zero). Does not know slots, requests or tensors.

Free blocks are on a stack in one array, so that many are taken in one slice. Cached blocks are
evicted by level, then by the pool's eviction order (cached_blocks.py): a block's level is that of
its retention claim (retention.py) or of a session that holds it (sessions.py), whichever is
higher. A request's blocks are released tail first, so that the head of a prefix, which more
requests share, is evicted last (as in vLLM).
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.cache_index import CacheIndex
from penstock.scheduler.cached_blocks import DEFAULT_LEVEL, CachedBlocks, EvictionOrder
from penstock.scheduler.check_pieces import PIECE, Faults
from penstock.scheduler.request import CacheRetention
from penstock.scheduler.retention import BlockClaims, RetentionBudget, RetentionCuts
from penstock.scheduler.sessions import SessionKey, Sessions


class BlockPool:
    """Reference counts, the free stack, and the index from content hash to block.

    Every block is in exactly one of: the free stack, the cached order, used. With `sessions` None
    there are no sessions, with `order` None eviction is LRU, with `budget` None retention has no
    limit.
    """

    def __init__(
        self,
        num_blocks: int,
        sessions: Sessions | None = None,
        order: EvictionOrder | None = None,
        budget: RetentionBudget | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self.num_blocks = num_blocks
        # Called for every digest that is removed; None without an index of cached blocks.
        self.cache_index: CacheIndex | None = None
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        # Reversed, so that a new pool hands out 0, 1, 2, ...
        self._stack: NDArray[np.int32] = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        # The place of the stack where `faults_at` last found each block; may be out of date.
        self._place_of: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        # Blocks that `allocate` can hand out: free ones, then cached ones by eviction. Read many
        # times a step, so it is maintained instead of counted.
        self.num_available = num_blocks
        self._cached = CachedBlocks(order)
        self._order = self._cached.order
        if budget is None:
            budget = RetentionBudget(
                max_num_blocks=num_blocks, max_num_of_tenant=num_blocks, max_duration_s=math.inf
            )
        self._claims = BlockClaims(budget)
        # Not `or`: sessions without blocks are false.
        if sessions is None:
            sessions = Sessions(level=100, ttl_s=0.0, max_num_blocks=0, max_num_each=0)
        self.sessions = sessions
        self._is_hashed: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        # Whether any block may be claimed or held: most pools never have one.
        self._has_standing = False
        # Whether a request without a low claim has released the block since its registration.
        self._is_settled: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_cached(self) -> int:
        """Number of unused blocks whose content may be reused."""
        return self.num_available - self._num_free

    @property
    def num_used(self) -> int:
        """Number of blocks with a reference."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Allocate `count` blocks, each with one reference; int32 [count].

        Raises ValueError if fewer are available: check `num_available` first.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available")
        self.num_available -= count
        from_stack = min(count, self._num_free)
        top = self._num_free
        blocks = self._stack[top - from_stack : top][::-1].copy()
        self._num_free = top - from_stack
        if from_stack < count:
            evicted: NDArray[np.int32] = np.array(
                self._cached.pop(count - from_stack), dtype=np.int32
            )
            self._unname(evicted)
            blocks = np.concatenate((blocks, evicted)) if from_stack else evicted
        self.ref_counts[blocks] = 1
        return blocks

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a hash chain; take no reference."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` are unused: sharing makes them unavailable."""
        if not blocks:
            return 0
        return int((self.ref_counts[np.array(blocks, dtype=np.int32)] == 0).sum())

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`, all of them used or cached."""
        if not blocks:
            return
        self.num_available -= self.num_unused(blocks)
        self._order.note_shared(blocks)
        self._cached.discard(blocks)
        self.ref_counts[np.array(blocks, dtype=np.int32)] += 1

    def release(
        self,
        blocks: NDArray[np.int32],
        retention: CacheRetention | None = None,
        now: float = 0.0,
        tenant: str = "",
    ) -> None:
        """Release one reference to each block of one table, int32 [n], no duplicates.

        `retention`: what the request of `tenant` claims from `now` on, for the blocks whose content
        is known.
        """
        counts = self.ref_counts[blocks] - 1
        self.ref_counts[blocks] = counts
        self._claim(blocks, retention, now, tenant)
        unused = blocks[counts == 0][::-1]
        self.num_available += len(unused)
        is_hashed = self._is_hashed[unused]
        plain = unused[~is_hashed]
        self._stack[self._num_free : self._num_free + len(plain)] = plain
        self._num_free += len(plain)
        if not self._has_standing:
            self._cached.extend(unused[is_hashed].tolist())
            return
        for level, run in groupby(unused[is_hashed].tolist(), self._level):
            self._cached.extend(list(run), level)

    def hold(self, key: SessionKey, turn: int, blocks: Sequence[int], now: float) -> None:
        """Let a session hold `blocks`, used or cached, in place of those of its previous turn."""
        self._has_standing = True
        self._move(self.sessions.hold(key, turn, blocks, now))

    def expire(self, now: float) -> None:
        """Expire claims and sessions."""
        if self._has_standing:
            self._move(self._claims.expire(now))
            self._move(self.sessions.expire(now))
            self._has_standing = bool(self._claims or self.sessions)

    def register(self, block: int, digest: bytes) -> None:
        """Register the content of a full, used block under its digest. The first block with a
        digest keeps it.
        """
        self._name(np.array([block], dtype=np.int32), [digest])

    def register_chain(
        self, table: NDArray[np.int32], digests: Sequence[bytes], places: range
    ) -> None:
        """Register the full, used blocks at `places` of a table, all of one hash chain, under their
        digests, and notify the eviction order.
        """
        self._name(table[places.start : places.stop], digests[places.start : places.stop])
        self._order.note_named(table, digests, places, self._block_of)

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Remove the digests of used blocks whose content is not trusted."""
        named = blocks[self._is_hashed[blocks]]
        self._unname(named)
        self._order.note_lost(named.tolist())

    @property
    def retention_cuts(self) -> RetentionCuts:
        """What the retention budget has cut so far."""
        return self._claims.cuts

    def level(self, block: int) -> int | None:
        """Return the level of a cached block, None for any other."""
        return self._cached.level(block) if block in self._cached else None

    def _claim(
        self,
        blocks: NDArray[np.int32],
        retention: CacheRetention | None,
        now: float,
        tenant: str,
    ) -> None:
        """Apply the retention that a request claims for the `blocks` it releases."""
        claims = self._claims
        level = DEFAULT_LEVEL if retention is None else retention.level
        if level >= DEFAULT_LEVEL:
            self._is_settled[blocks] = True
            if claims.num_low:
                claims.drop_low(blocks.tolist())
        if retention is None or level == DEFAULT_LEVEL:
            return
        named = blocks[self._is_hashed[blocks]]
        if level < DEFAULT_LEVEL:
            named = named[~self._is_settled[named]]
        self._has_standing = True
        # The head of a prefix comes last: more requests share it, so its claim is dropped last.
        self._move(claims.make(named[::-1].tolist(), retention, tenant, now))

    def _level(self, block: int) -> int:
        level = self._claims.level(block)
        return max(level, self.sessions.level) if block in self.sessions else level

    def _move(self, blocks: Iterable[int]) -> None:
        """Update the level of cached `blocks`, which may have changed."""
        for block in blocks:
            if block in self._cached:
                self._cached.move(block, self._level(block))

    def _name(self, blocks: NDArray[np.int32], digests: Sequence[bytes]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        named: list[int] = []
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest
                named.append(block)
        if len(named) < len(blocks):
            blocks = np.array(named, dtype=np.int32)
        self._is_hashed[blocks] = True
        self._is_settled[blocks] = False

    def _unname(self, blocks: NDArray[np.int32]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        numbers = blocks.tolist()
        if self.cache_index is not None:
            self.cache_index.note_lost([hash_of[block] for block in numbers])
        for block in numbers:
            del block_of[hash_of.pop(block)]
        self._is_hashed[blocks] = False
        if self._has_standing:
            for block in numbers:
                self._claims.drop(block)
                self.sessions.lose(block)

    def faults(self) -> Faults:
        """Yield the inconsistencies of the account, piece by piece; a part may change after its
        piece.
        """
        yield from self.total_faults()
        for start in range(0, self.num_blocks, PIECE):
            yield from self.faults_at(range(start, min(start + PIECE, self.num_blocks)))

    def total_faults(self) -> Faults:
        """Yield the inconsistencies of the totals and of the ordered structures."""
        is_used = self.ref_counts > 0
        num_named = int(np.count_nonzero(self._is_hashed))
        num_used = int(np.count_nonzero(is_used))
        num_cached = num_named - int(np.count_nonzero(self._is_hashed & is_used))
        if num_cached != len(self._cached) or num_used + num_cached + self._num_free != (
            self.num_blocks
        ):
            yield "free, cached and used blocks are not a partition of the pool"
        yield ""
        if self.num_available != self._num_free + len(self._cached):
            yield "the number of available blocks is not that of free and cached ones"
        if not num_named == len(self._block_of) == len(self._hash_of):
            yield "hash index and block names disagree"
        if self.cache_index is not None and self.cache_index.num_blocks != num_named:
            yield "the index of cached blocks and the hash index disagree"
        if not self._has_standing and (self._claims or self.sessions or self._cached.num_special):
            yield "a block is claimed or held and not accounted for"
        yield ""
        for part in (self._cached, self._claims, self.sessions):
            yield from part.faults()

    def faults_at(self, places: range) -> Faults:
        """Yield the inconsistencies of the blocks, and of the free stack's entries, with these
        numbers.

        Assumes nothing about other blocks, which may have changed since they were checked.
        """
        cached, claims, sessions = self._cached, self._claims, self.sessions
        names = list(map(self._hash_of.get, places))
        is_named = self._is_hashed[places.start : places.stop].tolist()
        counts = self.ref_counts[places.start : places.stop]
        if counts.min(initial=0) < 0:
            yield "a block has a negative reference count"
        if is_named != [name is not None for name in names]:
            yield "a block is marked as named and has no name, or the other way round"
        known = [None if name is None else self._block_of.get(name) for name in names]
        if known != [block if name else None for block, name in zip(places, names, strict=True)]:
            yield "hash index and block names disagree"
        is_cached = [block in cached for block in places]
        is_unused = (counts == 0).tolist()
        if is_cached != [a and b for a, b in zip(is_named, is_unused, strict=True)]:
            yield "free, cached and used blocks are not a partition of the pool"
        if self.cache_index is not None and any(
            name and name not in self.cache_index for name in names
        ):
            yield "the index of cached blocks and the hash index disagree"
        if self._has_standing:
            for block, is_there, name in zip(places, is_cached, names, strict=True):
                if is_there and cached.level(block) != self._level(block):
                    yield "a cached block has not the level it should have"
                if name is None and (block in claims or block in sessions):
                    yield "a block without a hash is claimed or held"
        yield self._stack_fault(places)

    def _stack_fault(self, places: range) -> str:
        """Check that each place of the stack has a free block that no other place has."""
        numbers = np.arange(places.start, min(places.stop, self._num_free), dtype=np.int32)
        blocks = self._stack[numbers]
        if self.ref_counts[blocks].any() or self._is_hashed[blocks].any():
            return "free, cached and used blocks are not a partition of the pool"
        # The place where a block was last seen may be another place that still has it, or out of
        # date.
        before = self._place_of[blocks]
        self._place_of[blocks] = numbers
        is_elsewhere = (before != numbers) & (before < self._num_free)
        is_twice = is_elsewhere & (self._stack[before] == blocks)
        if is_twice.any() or (self._place_of[blocks] != numbers).any():
            return "a free block stands twice"
        return ""
