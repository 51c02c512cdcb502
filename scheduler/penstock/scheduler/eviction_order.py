"""The eviction order of cached blocks of one level: its interface, and least recent use.

Does not know levels.
"""

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.check_pieces import Faults, is_sorted, pieces


class EvictionOrder(Protocol):
    """The cached blocks of one level.

    `num_turns`: how many blocks of the pool were released so far, at all levels. It is the only
    clock; the turn of a block is its number in that count. An order that learns also gets the
    events of used blocks.
    """

    num_turns: int

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def blocks(self) -> list[int]:
        """All of them, unordered."""
        ...

    def extend(self, blocks: Sequence[int]) -> None:
        """Blocks that were used until now, the tail of their chain first; assigns their turns."""
        ...

    def insert(self, block: int, turn: int) -> None:
        """A block that comes from another level and keeps its turn."""
        ...

    def take(self, block: int) -> int:
        """A block moves to another level; returns its turn."""
        ...

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove those of `blocks` that are here: they are used again."""
        ...

    def pop(self, count: int) -> list[int]:
        """Remove the `count` blocks that are evicted next; there must be as many."""
        ...

    def note_named(
        self,
        table: NDArray[np.int32],
        digests: Sequence[bytes],
        places: range,
        block_of: Mapping[bytes, int],
    ) -> None:
        """The blocks at `places` of a chain got their digests; `block_of` finds blocks by
        digest.
        """
        ...

    def note_shared(self, blocks: Sequence[int]) -> None:
        """Known blocks, used or cached, got one more user; called before `discard`."""
        ...

    def note_lost(self, blocks: Sequence[int]) -> None:
        """Blocks that are not cached lost their content."""
        ...

    def faults(self) -> Faults:
        """Inconsistencies of the account, piece by piece."""
        ...


class RecencyOrder:
    """Least recently used first.

    `added`: block -> turn, in order. `moved`: likewise for those that came from another level,
    which `_heap` orders; its entries that are not in `moved` are skipped.
    """

    __slots__ = ("_heap", "added", "moved", "num_turns")

    def __init__(self) -> None:
        self.num_turns = 0
        self.added: OrderedDict[int, int] = OrderedDict()
        self.moved: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.added) + len(self.moved)

    def __contains__(self, block: int) -> bool:
        return block in self.added or block in self.moved

    def blocks(self) -> list[int]:
        """See `EvictionOrder`."""
        return [*self.added, *self.moved]

    def extend(self, blocks: Sequence[int]) -> None:
        """See `EvictionOrder`."""
        turn, added = self.num_turns, self.added
        for block in blocks:
            turn += 1
            added[block] = turn
        self.num_turns = turn

    def insert(self, block: int, turn: int) -> None:
        """See `EvictionOrder`."""
        self.moved[block] = turn
        if len(self._heap) > 2 * len(self.moved) + 64:
            self._heap = [(turn, block) for block, turn in self.moved.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (turn, block))

    def take(self, block: int) -> int:
        """See `EvictionOrder`."""
        turn = self.moved.pop(block, None)
        return self.added.pop(block) if turn is None else turn

    def discard(self, blocks: Sequence[int]) -> None:
        """See `EvictionOrder`."""
        added, moved = self.added, self.moved
        for block in blocks:
            if added.pop(block, None) is None and moved:
                moved.pop(block, None)

    def pop(self, count: int) -> list[int]:
        """See `EvictionOrder`."""
        if not self.moved:
            return [self.added.popitem(last=False)[0] for _ in range(count)]
        popped: list[int] = []
        for _ in range(count):
            popped.append(self.oldest()[1])
            self.take(popped[-1])
        return popped

    def oldest(self) -> tuple[int, int]:
        """Turn and block of the least recently used one; there must be one."""
        heap, moved = self._heap, self.moved
        while heap and moved.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        first = next(iter(self.added.items()), None)
        if first is None or (heap and heap[0][0] < first[1]):
            return heap[0]
        return first[1], first[0]

    def note_named(
        self,
        table: NDArray[np.int32],
        digests: Sequence[bytes],
        places: range,
        block_of: Mapping[bytes, int],
    ) -> None:
        """See `EvictionOrder`; nothing is learnt here."""

    def note_shared(self, blocks: Sequence[int]) -> None:
        """See `EvictionOrder`; nothing is learnt here."""

    def note_lost(self, blocks: Sequence[int]) -> None:
        """See `EvictionOrder`; nothing is learnt here."""

    def faults(self) -> Faults:
        """See `EvictionOrder`."""
        for piece in pieces(self.moved):
            yield "a cached block stands twice" if self.added.keys() & piece else ""
        for is_in_order in is_sorted(self.added.values()):
            yield "" if is_in_order else "cached blocks are out of order"
        # The last is the youngest, as they are in order.
        newest = next(reversed(self.added.values()), 0)
        yield "a cached block is younger than the pool" if newest > self.num_turns else ""
