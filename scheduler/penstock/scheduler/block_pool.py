"""Who holds which block of KV memory.

Owns the identity of blocks: free, cached (free to take, content still known by its hash) or used
(reference count above zero). Does not know slots, requests or tensors.

Free blocks lie on a stack in one array, so that many are taken in one slice. Cached blocks are
evicted by level, then by the eviction order that the pool is given (eviction_order.py): a block's
level is what its requests asked for (block_claims.py) or that of sessions while one holds it
(sessions.py), whichever is higher. Blocks of one request are given back tail first, so that the
head of a prefix, which more requests share, is evicted last (the order vLLM established).
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_claims import BlockClaims
from penstock.scheduler.cache_book import CacheBook
from penstock.scheduler.cached_blocks import DEFAULT_LEVEL, CachedBlocks
from penstock.scheduler.eviction_order import EvictionOrder
from penstock.scheduler.request_options import CacheRetention
from penstock.scheduler.sessions import SessionKey, Sessions


class BlockPool:
    """Reference counts, the free stack, and the index from content hash to block.

    Every block is in exactly one of: the free stack, the cached order, used. Without `sessions`
    there are none; without `order` the block used longest ago goes first.
    """

    def __init__(
        self,
        num_blocks: int,
        sessions: Sessions | None = None,
        order: EvictionOrder | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self.num_blocks = num_blocks
        # Told of every name that is lost; None where nobody asks what is cached.
        self.book: CacheBook | None = None
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        # Reversed, so that a fresh pool hands out 0, 1, 2, ...
        self._stack: NDArray[np.int32] = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        # Blocks that `allocate` can hand out: free ones, then cached ones by eviction. Asked for
        # many times a step, so it is kept and not counted.
        self.num_available = num_blocks
        self._cached = CachedBlocks(order)
        self._order = self._cached.order
        self._claims = BlockClaims()
        # Not `or`: sessions without blocks count as false.
        if sessions is None:
            sessions = Sessions(level=100, ttl_s=0.0, max_num_blocks=0, max_num_each=0)
        self.sessions = sessions
        self._is_hashed: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        # Whether any block may be claimed or held: most pools never have one.
        self._has_standing = False
        # Since it got its name, somebody has left the block who wants it no less than the default.
        self._is_settled: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_cached(self) -> int:
        """Blocks nobody uses whose content may be reused."""
        return self.num_available - self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Take `count` blocks, each with one reference; int32 [count].

        Raises ValueError when fewer are available: ask `num_available` first.
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
        """Blocks of the longest known prefix of a hash chain; takes no reference."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody uses: sharing them makes them unavailable."""
        if not blocks:
            return 0
        return int((self.ref_counts[np.array(blocks, dtype=np.int32)] == 0).sum())

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of `blocks`, all of them used or cached."""
        if not blocks:
            return
        self.num_available -= self.num_unused(blocks)
        self._order.note_shared(blocks)
        self._cached.discard(blocks)
        self.ref_counts[np.array(blocks, dtype=np.int32)] += 1

    def release(
        self, blocks: NDArray[np.int32], retention: CacheRetention | None = None, now: float = 0.0
    ) -> None:
        """Give back one reference to each block of one table, int32 [n], no duplicates.

        `retention`: what the request wants for those whose content is known, from `now` on.
        """
        counts = self.ref_counts[blocks] - 1
        self.ref_counts[blocks] = counts
        self._claim(blocks, retention, now)
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
        """Let a session hold `blocks`, used or cached, in place of those of its turn before."""
        self._has_standing = True
        self._move(self.sessions.hold(key, turn, blocks, now))

    def expire(self, now: float) -> None:
        """Let every claim and session go whose time is up."""
        if self._has_standing:
            self._move(self._claims.expire(now))
            self._move(self.sessions.expire(now))
            self._has_standing = bool(self._claims or self.sessions)

    def register(self, block: int, digest: bytes) -> None:
        """Name the content of a full, used block. The first block with a digest keeps it."""
        self._name(np.array([block], dtype=np.int32), [digest])

    def register_chain(
        self, table: NDArray[np.int32], digests: Sequence[bytes], places: range
    ) -> None:
        """Name the full, used blocks at `places` of a table, the blocks of one hash chain from its
        start, and learn from what was known of the chain before.
        """
        self._name(table[places.start : places.stop], digests[places.start : places.stop])
        self._order.note_named(table, digests, places, self._block_of)

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Drop the names of used blocks whose content is not to be trusted."""
        named = blocks[self._is_hashed[blocks]]
        self._unname(named)
        self._order.note_lost(named.tolist())

    def level(self, block: int) -> int | None:
        """The level of a block among those that are cached, None when it is not."""
        return self._cached.level(block) if block in self._cached else None

    def _claim(
        self, blocks: NDArray[np.int32], retention: CacheRetention | None, now: float
    ) -> None:
        """What a request that leaves `blocks` wants for them."""
        claims = self._claims
        level = DEFAULT_LEVEL if retention is None else retention.priority
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
        for block in named.tolist():
            claims.make(block, level, now + retention.duration_s)

    def _level(self, block: int) -> int:
        level = self._claims.level(block)
        return max(level, self.sessions.level) if block in self.sessions else level

    def _move(self, blocks: Iterable[int]) -> None:
        """The standing of `blocks` changed: those that are cached get their level anew."""
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
        if self.book is not None:
            self.book.note_lost([hash_of[block] for block in numbers])
        for block in numbers:
            del block_of[hash_of.pop(block)]
        self._is_hashed[blocks] = False
        if self._has_standing:
            for block in numbers:
                self._claims.drop(block)
                self.sessions.lose(block)

    def faults(self) -> list[str]:
        """What is wrong with the account itself; empty when it adds up."""
        free = self._stack[: self._num_free].tolist()
        cached = self._cached.blocks()
        used = np.flatnonzero(self.ref_counts > 0).tolist()
        found: list[str] = []
        if sorted(free + cached + used) != list(range(self.num_blocks)):
            found.append("free, cached and used blocks are not a partition of the pool")
        if self.num_available != len(free) + len(cached):
            found.append("the number of available blocks is not that of free and cached ones")
        if (self.ref_counts < 0).any():
            found.append("a block has a negative reference count")
        if any(block not in self._hash_of for block in cached):
            found.append("a cached block has no hash")
        if any(self._is_hashed[block] for block in free):
            found.append("a free block has a hash")
        if {b: d for d, b in self._block_of.items()} != self._hash_of:
            found.append("hash index and block names disagree")
        if any(self._cached.level(block) != self._level(block) for block in cached):
            found.append("a cached block has not the level it should have")
        special = [b for b in range(self.num_blocks) if b in self._claims or b in self.sessions]
        if any(not self._is_hashed[block] for block in special):
            found.append("a block without a hash is claimed or held")
        if special and not self._has_standing:
            found.append("a block is claimed or held and nobody looks")
        found += self._cached.faults() + self._claims.faults() + self.sessions.faults()
        return found + self._book_faults()

    def _book_faults(self) -> list[str]:
        if self.book is None or self.book.digests == self._block_of.keys():
            return []
        return ["the book of what is cached and the hash index disagree"]
