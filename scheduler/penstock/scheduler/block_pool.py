"""Who holds which block of KV memory.

Owns the identity of blocks: free, cached (free to take, content still known by its hash) or used
(reference count above zero). Does not know slots, requests or tensors.

Free blocks lie on a stack in one array, so that many are taken in one slice. Cached blocks stand
in least-recently-used order. Blocks of one request are given back tail first, so that the head of
a prefix, which more requests share, is evicted last (the order vLLM established).
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """Reference counts, the free stack, and the index from content hash to block.

    Every block is in exactly one of: the free stack, the cached order, used.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self.num_blocks = num_blocks
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        # Reversed, so that a fresh pool hands out 0, 1, 2, ...
        self._stack: NDArray[np.int32] = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._is_hashed: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_cached(self) -> int:
        """Blocks nobody uses whose content may be reused."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, then cached ones by eviction."""
        return self._num_free + len(self._cached)

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
        from_stack = min(count, self._num_free)
        top = self._num_free
        blocks = self._stack[top - from_stack : top][::-1].copy()
        self._num_free = top - from_stack
        if from_stack < count:
            evicted = [self._evict() for _ in range(count - from_stack)]
            blocks = np.concatenate((blocks, np.array(evicted, dtype=np.int32)))
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
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of `blocks`, all of them used or cached."""
        if not blocks:
            return
        for block in blocks:
            self._cached.pop(block, None)
        self.ref_counts[np.array(blocks, dtype=np.int32)] += 1

    def release(self, blocks: NDArray[np.int32]) -> None:
        """Give back one reference to each block of one table, int32 [n], no duplicates."""
        self.ref_counts[blocks] -= 1
        unused = blocks[self.ref_counts[blocks] == 0][::-1]
        is_hashed = self._is_hashed[unused]
        plain = unused[~is_hashed]
        self._stack[self._num_free : self._num_free + len(plain)] = plain
        self._num_free += len(plain)
        for block in unused[is_hashed].tolist():
            self._cached[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Name the content of a full, used block. The first block with a digest keeps it."""
        if digest not in self._block_of and not self._is_hashed[block]:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            self._is_hashed[block] = True

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Drop the names of used blocks whose content is not to be trusted."""
        for block in blocks[self._is_hashed[blocks]].tolist():
            self._unname(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unname(block)
        return block

    def _unname(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
        self._is_hashed[block] = False

    def faults(self) -> list[str]:
        """What is wrong with the account itself; empty when it adds up."""
        free = self._stack[: self._num_free].tolist()
        cached = list(self._cached)
        used = np.flatnonzero(self.ref_counts > 0).tolist()
        found: list[str] = []
        if sorted(free + cached + used) != list(range(self.num_blocks)):
            found.append("free, cached and used blocks are not a partition of the pool")
        if (self.ref_counts < 0).any():
            found.append("a block has a negative reference count")
        if any(block not in self._hash_of for block in cached):
            found.append("a cached block has no hash")
        if any(self._is_hashed[block] for block in free):
            found.append("a free block has a hash")
        if {b: d for d, b in self._block_of.items()} != self._hash_of:
            found.append("hash index and block names disagree")
        return found
