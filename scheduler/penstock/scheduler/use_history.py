"""Counts how often each block was used, including uses before its eviction.

The counts of evicted blocks are kept as a history, by digest, about 200 bytes each. The eviction
order is defined elsewhere.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.scheduler.check_pieces import Faults, pieces

MAX_USES = 8


class Recomputed(NamedTuple):
    """A part of a chain that was evicted and is computed again: `num_blocks` blocks. Each had been
    used `num_uses` times when it was evicted. `tick`: when they last became cached (see
    `cached_blocks.EvictionOrder`).
    """

    num_uses: int
    tick: int
    num_blocks: int


class UseHistory:
    """The number of uses of each block, including uses before its last eviction.

    `uses`: one byte per block: how often each block was used, 1 to MAX_USES; 1 for a block without
    content. The counts of the `max_num_remembered` blocks that were evicted last are kept.
    """

    def __init__(self, num_blocks: int, max_num_remembered: int) -> None:
        self.uses = bytearray(b"\x01" * num_blocks)
        self._digest_of: dict[int, bytes] = {}
        # Number of uses, and the tick at which the block last became cached.
        self._remembered: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._max_num_remembered = max_num_remembered

    def note_use(self, blocks: Sequence[int]) -> None:
        """Count one more use, up to MAX_USES, of each of these blocks. Their digests are
        registered.
        """
        uses = self.uses
        for block in blocks:
            if uses[block] < MAX_USES:
                uses[block] += 1

    def register(self, blocks: Sequence[int], digests: Sequence[bytes]) -> list[Recomputed]:
        """Register the digests of new blocks; return the parts of their chain that had been
        evicted. The use counts of these parts continue from the history.
        """
        self._digest_of.update(zip(blocks, digests, strict=True))
        if self._remembered.keys().isdisjoint(digests):
            return []
        recomputed: list[Recomputed] = []
        for block, digest in zip(blocks, digests, strict=True):
            known = self._remembered.pop(digest, None)
            if known is None:
                continue
            self.uses[block] = min(known[0] + 1, MAX_USES)
            if recomputed and recomputed[-1][:2] == known:
                recomputed[-1] = Recomputed(*known, recomputed[-1].num_blocks + 1)
            else:
                recomputed.append(Recomputed(*known, 1))
        return recomputed

    def evict(self, blocks: Sequence[int], tick: int) -> None:
        """Move the use counts of `blocks` to the history, because the blocks are evicted. `tick`:
        when they last became cached (see `cached_blocks.EvictionOrder`).
        """
        digest_of, remembered, uses = self._digest_of, self._remembered, self.uses
        for block in blocks:
            remembered[digest_of.pop(block)] = (uses[block], tick)
            uses[block] = 1
        while len(remembered) > self._max_num_remembered:
            remembered.popitem(last=False)

    def discard(self, blocks: Sequence[int]) -> None:
        """Discard the use counts and digests of `blocks`, without adding them to the history."""
        for block in blocks:
            self._digest_of.pop(block, None)
            self.uses[block] = 1

    def faults(self) -> Faults:
        """Check the history in small parts; yield each part's fault, or an empty string."""
        for digests in pieces(self._digest_of.values()):
            if self._remembered.keys() & digests:
                yield "a block is there and remembered as evicted"
            yield ""
        if len(self._remembered) > self._max_num_remembered:
            yield "more is remembered than may be"
        uses = np.frombuffer(self.uses, dtype=np.uint8)
        if uses.min() < 1 or uses.max() > MAX_USES:
            yield "a block was used less than once or more often than is counted"
