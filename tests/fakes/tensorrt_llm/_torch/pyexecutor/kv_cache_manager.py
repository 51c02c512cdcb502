"""The page pool, which keeps the content of released pages for reuse and evicts it when free pages
are needed.

Only whole pages are reused; the real pool can also copy parts. A page that no request holds is free
although its content may still be found. Free pages without content are taken first, then the pages
released longest ago.
"""

from collections import OrderedDict
from collections.abc import Sequence


def block_keys(root: object, tokens: Sequence[int], tokens_per_block: int) -> list[int]:
    """Return one key per full block of `tokens`; a key covers all tokens up to its block's end."""
    keys: list[int] = []
    key = hash(("root", root))
    for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
        key = hash((key, tuple(tokens[end - tokens_per_block : end])))
        keys.append(key)
    return keys


class KvCacheManager:
    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._holders = [0] * num_blocks
        self._keys: list[int | None] = [None] * num_blocks
        self._by_key: dict[int, int] = {}
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of pages held by requests; a shared page counts once."""
        return self.num_blocks - len(self._free)

    def match(self, keys: Sequence[int]) -> list[int]:
        """Return the pages of the longest prefix of `keys` that is in the pool, without
        holding them.
        """
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to pages that `match` returned."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Return `count` free pages and remove their content; at most `num_free` may be taken."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._by_key[key]
            self._holders[block] = 1
        return taken

    def store(self, block: int, key: int) -> None:
        """Add a held page to the reuse index under `key`, unless the page is in it or another page
        has the key.
        """
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Release pages, the last one first, so that the first pages of a prompt are
        evicted last.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)
