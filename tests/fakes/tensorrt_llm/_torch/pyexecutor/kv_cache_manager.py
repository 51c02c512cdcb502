"""The page pool: pages in use, released pages that are kept for reuse, and eviction.

Whole pages are reused, never parts (the real pool can copy parts). A page that no request holds is
free although its content may still be found; the page with the lowest priority is evicted first,
the least recent one among equals.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

DEFAULT_PRIORITY = 35
Key = int


def block_keys(root: object, tokens: Sequence[int], tokens_per_block: int) -> list[Key]:
    """Return keys of the full blocks of `tokens`; a key covers all tokens up to the block's end."""
    keys: list[Key] = []
    key = hash(("root", root))
    for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
        key = hash((key, tuple(tokens[end - tokens_per_block : end])))
        keys.append(key)
    return keys


class KvCacheManager:
    """A pool of `num_blocks` pages of `tokens_per_block` tokens."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._priorities = [DEFAULT_PRIORITY] * num_blocks
        self._by_key: dict[Key, int] = {}
        self._free: dict[int, OrderedDict[int, None]] = {0: OrderedDict.fromkeys(range(num_blocks))}
        self.num_free = num_blocks
        self.num_allocated = 0
        self.num_new = 0
        self.num_reused = 0
        self.num_missed = 0

    @property
    def num_used(self) -> int:
        """Number of pages held by requests; shared ones count once."""
        return self.num_blocks - self.num_free

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Return the longest run of pages that hold `keys` from the first on; take none of them."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of these pages are free now."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Share pages that were matched."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[self._free_priority(block)][block]
                self.num_free -= 1
            self._holders[block] += 1
        self.num_reused += len(blocks)
        self.num_allocated += len(blocks)

    def take(self, count: int) -> list[int]:
        """Take new pages; the caller has checked `num_free`."""
        taken: list[int] = []
        for _ in range(count):
            bucket = self._free[min(level for level, blocks in self._free.items() if blocks)]
            block, _none = bucket.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        self.num_free -= count
        self.num_new += count
        self.num_missed += count
        self.num_allocated += count
        return taken

    def store(self, block: int, key: Key, priority: int) -> None:
        """Add a held page to the reuse index; the first page of a key stays."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key
            self._priorities[block] = priority

    def release(self, blocks: Sequence[int]) -> None:
        """Release pages, last first, so that the beginning of a prompt stays longest."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                level = self._free_priority(block)
                self._free.setdefault(level, OrderedDict())[block] = None
                self.num_free += 1

    def _free_priority(self, block: int) -> int:
        """Return the eviction priority; pages without contents go first."""
        return 0 if self._keys[block] is None else 1 + self._priorities[block]

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
