"""Manages the pool of KV cache blocks: allocates, shares, releases and evicts them.

Keeps the state of each block: free, cached (unused, but its content is registered under a hash and
can be reused) or used (reference count above zero). Independent of slots, requests and tensors.

Free blocks are on a stack in one array, so that many are taken in one slice. Cached blocks are
evicted by level, then by the pool's eviction order (cached_blocks.py): a block's level is the
retention level that a request set for it (its claim, see retention.py) or the level of sessions if
a session holds it (sessions.py), whichever is higher. A request's blocks are released tail first,
so that the head of a prefix is evicted last, because more requests share the head (as in vLLM).
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

    Every block is either free, cached or used. Defaults: no sessions, LRU eviction, retention
    without a budget. Raises ValueError if `num_blocks` is below 1.
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
        # By block: the stack position where `faults_at` last found it; may be out of date.
        self._stack_position_of: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        # Number of blocks that `allocate` can return: free blocks, and cached blocks, which are
        # evicted. Read many times per step, so it is maintained instead of counted.
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
        # False if no block is claimed or held (checked in `expire`): the usual case.
        self._has_standing = False
        # By block: whether a request without a claim below the default has released it since its
        # registration.
        self._is_settled: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_cached(self) -> int:
        """Number of unused blocks whose content may be reused."""
        return self.num_available - self._num_free

    @property
    def num_used(self) -> int:
        """Number of blocks with a reference count above zero."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Allocate `count` blocks, free ones before cached ones, each with one reference; return
        them, int32 [count].

        Raises ValueError if fewer are available: check `num_available` first.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks requested, {self.num_available} available")
        self.num_available -= count
        from_stack = min(count, self._num_free)
        top = self._num_free
        blocks = self._stack[top - from_stack : top][::-1].copy()
        self._num_free = top - from_stack
        if from_stack < count:
            evicted: NDArray[np.int32] = np.array(
                self._cached.pop(count - from_stack), dtype=np.int32
            )
            self._unregister(evicted)
            blocks = np.concatenate((blocks, evicted)) if from_stack else evicted
        self.ref_counts[blocks] = 1
        return blocks

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached or used prefix of a hash chain, without adding
        references.
        """
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` are unused. An unused block that is shared is no longer
        available for allocation.
        """
        if not blocks:
            return 0
        return int((self.ref_counts[np.array(blocks, dtype=np.int32)] == 0).sum())

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`. The blocks must be used or cached."""
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
        """Release one reference to each block of one block table, int32 [n], no duplicates.

        `retention`: the retention that the request sets; it applies to the blocks whose digests are
        registered, starts at `now` and counts against the budget of `tenant`.
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
        """Make a session hold `blocks`, used or cached, instead of the blocks of its previous turn;
        see `Sessions.hold`.
        """
        self._has_standing = True
        self._move(self.sessions.hold(key, turn, blocks, now))

    def expire(self, now: float) -> None:
        """End the retention claims and sessions that have expired."""
        if self._has_standing:
            self._move(self._claims.expire(now))
            self._move(self.sessions.expire(now))
            self._has_standing = bool(self._claims or self.sessions)

    def register(self, block: int, digest: bytes) -> None:
        """Register the content of a full, used block under its digest; a no-op if the digest or the
        block is already registered.
        """
        self._register_blocks(np.array([block], dtype=np.int32), [digest])

    def register_chain(
        self, table: NDArray[np.int32], digests: Sequence[bytes], positions: range
    ) -> None:
        """Register the full, used blocks at the positions `positions` of a block table under their
        digests, as `register` does. `digests`: the hash chain of the whole table.
        """
        self._register_blocks(
            table[positions.start : positions.stop], digests[positions.start : positions.stop]
        )

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Remove the digests of used blocks, because their content may be invalid; blocks without a
        digest are ignored.
        """
        registered = blocks[self._is_hashed[blocks]]
        self._unregister(registered)
        self._order.note_unregistered(registered.tolist())

    @property
    def retention_cuts(self) -> RetentionCuts:
        """How many retentions were shortened, and how many blocks lost theirs because of the
        budget, so far.
        """
        return self._claims.cuts

    def level(self, block: int) -> int | None:
        """Return the eviction level of a cached block; None if the block is not cached."""
        return self._cached.level(block) if block in self._cached else None

    def _claim(
        self,
        blocks: NDArray[np.int32],
        retention: CacheRetention | None,
        now: float,
        tenant: str,
    ) -> None:
        """Apply the retention of a request to the `blocks` that it releases. A level of at least
        the default, or no retention, also ends claims below the default level on them.
        """
        claims = self._claims
        level = DEFAULT_LEVEL if retention is None else retention.level
        if level >= DEFAULT_LEVEL:
            self._is_settled[blocks] = True
            if claims.num_low:
                claims.drop_low(blocks.tolist())
        if retention is None or level == DEFAULT_LEVEL:
            return
        registered = blocks[self._is_hashed[blocks]]
        if level < DEFAULT_LEVEL:
            registered = registered[~self._is_settled[registered]]
        self._has_standing = True
        # The head of a prefix comes last: more requests share it, so its claim is dropped last.
        self._move(claims.make(registered[::-1].tolist(), retention, tenant, now))

    def _level(self, block: int) -> int:
        level = self._claims.level(block)
        return max(level, self.sessions.level) if block in self.sessions else level

    def _move(self, blocks: Iterable[int]) -> None:
        """Update the eviction level of the blocks in `blocks` that are cached."""
        for block in blocks:
            if block in self._cached:
                self._cached.move(block, self._level(block))

    def _register_blocks(self, blocks: NDArray[np.int32], digests: Sequence[bytes]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        registered: list[int] = []
        names: list[bytes] = []
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest
                registered.append(block)
                names.append(digest)
        if len(registered) < len(blocks):
            blocks = np.array(registered, dtype=np.int32)
        self._is_hashed[blocks] = True
        self._is_settled[blocks] = False
        self._order.note_registered(registered, names)

    def _unregister(self, blocks: NDArray[np.int32]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        numbers = blocks.tolist()
        if self.cache_index is not None:
            self.cache_index.note_unregistered([hash_of[block] for block in numbers])
        for block in numbers:
            del block_of[hash_of.pop(block)]
        self._is_hashed[blocks] = False
        if self._has_standing:
            for block in numbers:
                self._claims.drop(block)
                self.sessions.remove_block(block)

    def faults(self) -> Faults:
        """Check the pool in small parts; yield each part's fault, or an empty string."""
        yield from self.total_faults()
        for start in range(0, self.num_blocks, PIECE):
            yield from self.faults_at(range(start, min(start + PIECE, self.num_blocks)))

    def total_faults(self) -> Faults:
        """Check the totals, the cached blocks, the claims and the sessions in small parts; yield
        each part's fault, or an empty string.
        """
        is_used = self.ref_counts > 0
        num_registered = int(np.count_nonzero(self._is_hashed))
        num_used = int(np.count_nonzero(is_used))
        num_cached = num_registered - int(np.count_nonzero(self._is_hashed & is_used))
        if num_cached != len(self._cached) or num_used + num_cached + self._num_free != (
            self.num_blocks
        ):
            yield "free, cached and used blocks are not a partition of the pool"
        yield ""
        if self.num_available != self._num_free + len(self._cached):
            yield "num_available is not the number of free and cached blocks"
        if not num_registered == len(self._block_of) == len(self._hash_of):
            yield "hash index and the blocks' digests are inconsistent"
        if self.cache_index is not None and self.cache_index.num_blocks != num_registered:
            yield "the index of cached blocks and the hash index are inconsistent"
        if not self._has_standing and (self._claims or self.sessions or self._cached.num_special):
            yield "a block is claimed or held and not accounted for"
        yield ""
        for part in (self._cached, self._claims, self.sessions):
            yield from part.faults()

    def faults_at(self, positions: range) -> Faults:
        """Check the blocks with these numbers, and the free-stack entries at these positions; yield
        their faults, as `faults` does.

        Assumes nothing about other blocks, because they may have changed since they were checked.
        """
        cached, claims, sessions = self._cached, self._claims, self.sessions
        names = list(map(self._hash_of.get, positions))
        is_registered = self._is_hashed[positions.start : positions.stop].tolist()
        counts = self.ref_counts[positions.start : positions.stop]
        if counts.min(initial=0) < 0:
            yield "a block has a negative reference count"
        if is_registered != [name is not None for name in names]:
            yield "a block's digest and its mark as hashed are inconsistent"
        known = [None if name is None else self._block_of.get(name) for name in names]
        if known != [block if name else None for block, name in zip(positions, names, strict=True)]:
            yield "hash index and the blocks' digests are inconsistent"
        is_cached = [block in cached for block in positions]
        is_unused = (counts == 0).tolist()
        if is_cached != [a and b for a, b in zip(is_registered, is_unused, strict=True)]:
            yield "free, cached and used blocks are not a partition of the pool"
        if self.cache_index is not None and any(
            name and name not in self.cache_index for name in names
        ):
            yield "the index of cached blocks and the hash index are inconsistent"
        if self._has_standing:
            for block, is_there, name in zip(positions, is_cached, names, strict=True):
                if is_there and cached.level(block) != self._level(block):
                    yield "a cached block has a wrong level"
                if name is None and (block in claims or block in sessions):
                    yield "a block without a hash is claimed or held"
        yield self._stack_fault(positions)

    def _stack_fault(self, positions: range) -> str:
        """Return the fault of these stack positions; empty if they have different free blocks."""
        numbers = np.arange(positions.start, min(positions.stop, self._num_free), dtype=np.int32)
        blocks = self._stack[numbers]
        if self.ref_counts[blocks].any() or self._is_hashed[blocks].any():
            return "free, cached and used blocks are not a partition of the pool"
        # The last recorded position of a block may be out of date. If it is another position that
        # still has the block, the block is on the stack twice.
        before = self._stack_position_of[blocks]
        self._stack_position_of[blocks] = numbers
        is_elsewhere = (before != numbers) & (before < self._num_free)
        is_twice = is_elsewhere & (self._stack[before] == blocks)
        if is_twice.any() or (self._stack_position_of[blocks] != numbers).any():
            return "a block is twice on the free stack"
        return ""
