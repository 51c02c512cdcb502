"""How often each block was used, including uses before its eviction.

Owns the number of uses of every block and the history of evicted ones. Does not know the eviction
order.

A digest identifies a whole prefix, so a few blocks of a chain, its marks, can represent the blocks
after them: the first, the ninth, the 33rd, and then every 32nd. Only marks are remembered:
`max_num_remembered` digests, those evicted last, about 200 bytes each. A new block between marks
gets the uses of its mark if the mark was computed again with it, and none if its mark was still
cached: then the chain diverges at the block.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.check_pieces import Faults, pieces

MAX_USES = 8
_EARLY = 8
_STRIDE = 32


def mark_of(place: int) -> int:
    """Return the mark that represents the block at `place` of its chain."""
    if place >= _STRIDE:
        return place - place % _STRIDE
    return _EARLY if place >= _EARLY else 0


def mark_after(place: int) -> int:
    """Return the next mark after `place`."""
    return _EARLY if place < _EARLY else place - place % _STRIDE + _STRIDE


class Return(NamedTuple):
    """An evicted part of a chain that was computed again: `num_blocks` blocks that had been used
    `num_uses` times and released at `turn` when they were evicted.
    """

    num_uses: int
    turn: int
    num_blocks: int


class UseHistory:
    """`uses` [num_blocks]: how often each block was used, 1 to MAX_USES; 1 for a block without
    content.
    """

    def __init__(self, num_blocks: int, max_num_remembered: int) -> None:
        self.uses = bytearray(b"\x01" * num_blocks)
        self._digest_of: dict[int, bytes] = {}
        # Marks that came back after the cache had lost them, until they are shared.
        self._returned: set[int] = set()
        self._remembered: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._max_num_remembered = max_num_remembered

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more use of known blocks."""
        uses = self.uses
        for block in blocks:
            if uses[block] < MAX_USES:
                uses[block] += 1
        if self._returned:
            self._returned.difference_update(blocks)

    def name(
        self,
        table: NDArray[np.int32],
        digests: Sequence[bytes],
        places: range,
        block_of: Mapping[bytes, int],
    ) -> list[Return]:
        """Register the digests of a chain's blocks; return the evicted parts that came back."""
        returns: list[Return] = []
        place = places.start
        while place < places.stop:
            stop = min(mark_after(place), places.stop)
            if place == mark_of(place):
                known = self._mark(int(table[place]), digests[place], block_of)
                if known is not None:
                    returns.append(Return(*known, stop - place))
            if self._returned:
                self._follow(table, digests, range(place, stop), block_of)
            place = stop
        return returns

    def _mark(
        self, block: int, digest: bytes, block_of: Mapping[bytes, int]
    ) -> tuple[int, int] | None:
        """Register a mark's digest; return its uses and turn if it was known before."""
        if block_of[digest] != block:
            # Another chain computed it at the same time and named it first.
            return None
        self._digest_of[block] = digest
        known = self._remembered.pop(digest, None)
        if known is not None:
            self.uses[block] = min(known[0] + 1, MAX_USES)
            self._returned.add(block)
        return known

    def _follow(
        self,
        table: NDArray[np.int32],
        digests: Sequence[bytes],
        places: range,
        block_of: Mapping[bytes, int],
    ) -> None:
        """Give blocks that follow a mark its uses, if the mark was known before."""
        mark = int(table[mark_of(places.start)])
        if mark in self._returned:
            blocks = table[places.start : places.stop].tolist()
            for block, digest in zip(blocks, digests[places.start : places.stop], strict=True):
                if block_of.get(digest) == block:
                    self.uses[block] = self.uses[mark]

    def evict(self, blocks: Sequence[int], turn: int) -> None:
        """Record that `blocks`, released at about `turn`, lose their content to others."""
        digest_of, remembered = self._digest_of, self._remembered
        uses = self.uses
        for block in blocks:
            if block in digest_of:
                remembered[digest_of.pop(block)] = (uses[block], turn)
            uses[block] = 1
        if self._returned:
            self._returned.difference_update(blocks)
        while len(remembered) > self._max_num_remembered:
            remembered.popitem(last=False)

    def lose(self, blocks: Sequence[int]) -> None:
        """Remove `blocks`: their content is lost and invalid."""
        for block in blocks:
            self._digest_of.pop(block, None)
            self.uses[block] = 1
        self._returned.difference_update(blocks)

    def faults(self) -> Faults:
        """Yield the inconsistencies of the account, piece by piece."""
        for blocks in pieces(self._returned):
            yield (
                "" if self._digest_of.keys() >= set(blocks) else "a block without a mark came back"
            )
        for digests in pieces(self._digest_of.values()):
            if self._remembered.keys() & digests:
                yield "a mark is there and remembered as evicted"
            yield ""
        if len(self._remembered) > self._max_num_remembered:
            yield "more is remembered than may be"
        uses = np.frombuffer(self.uses, dtype=np.uint8)
        if uses.min() < 1 or uses.max() > MAX_USES:
            yield "a block was used less than once or more often than is counted"
