"""Keeps the cached blocks in the order in which they are evicted.

Lower levels are evicted first. An `EvictionOrder` determines the order within the default level.
Requests and sessions set other levels for blocks; these levels use LRU.

A block that changes its level keeps its age: when it returns to the default level, it is placed
among the blocks released at the same time, not behind all others.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from penstock.scheduler.check_pieces import Faults, is_sorted, pieces
from penstock.scheduler.request import DEFAULT_RETENTION_LEVEL


class EvictionOrder(Protocol):
    """The cached blocks of one level, in order of eviction.

    `num_ticks`: how many blocks of the pool have become cached so far, at all levels. It is the
    logical clock: the tick of a block is this count when it became cached. The `note_` methods are
    for orders that learn from hits.
    """

    num_ticks: int

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def blocks(self) -> list[int]:
        """Return all blocks of this order, unsorted."""
        ...

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks of one chain that are no longer used, the last of the chain first; set their
        ticks.
        """
        ...

    def insert(self, block: int, tick: int) -> None:
        """Add a block from another level; it keeps its tick."""
        ...

    def take(self, block: int) -> int:
        """Remove a block that moves to another level; return its tick."""
        ...

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove the blocks in `blocks` that are in this order, because they are used again."""
        ...

    def pop(self, count: int) -> list[int]:
        """Remove and return the `count` blocks to evict next; there must be that many."""
        ...

    def note_registered(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Record the digests of used blocks that were registered, in order of their chain."""
        ...

    def note_shared(self, blocks: Sequence[int]) -> None:
        """Record one more use of each of `blocks`. Their digests must be registered. Called before
        `discard`.
        """
        ...

    def note_unregistered(self, blocks: Sequence[int]) -> None:
        """Discard the statistics of these blocks. They are not in this order: either they were
        evicted from another level, or they are used and their content may be invalid.
        """
        ...

    def faults(self) -> Faults:
        """Check the order in small parts; yield each part's fault, or an empty string."""
        ...


class RecencyOrder:
    """An `EvictionOrder` that evicts the least recently used blocks first.

    `added`: the tick of each block added by `extend`, oldest first. `moved`: the tick of each block
    from another level; `_heap` sorts these by tick, and may have stale entries.
    """

    __slots__ = ("_heap", "added", "moved", "num_ticks")

    def __init__(self) -> None:
        self.num_ticks = 0
        self.added: OrderedDict[int, int] = OrderedDict()
        self.moved: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.added) + len(self.moved)

    def __contains__(self, block: int) -> bool:
        return block in self.added or block in self.moved

    def blocks(self) -> list[int]:
        """Return all blocks of this order, unsorted."""
        return [*self.added, *self.moved]

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks of one chain that are no longer used, the last of the chain first; set their
        ticks.
        """
        tick, added = self.num_ticks, self.added
        for block in blocks:
            tick += 1
            added[block] = tick
        self.num_ticks = tick

    def insert(self, block: int, tick: int) -> None:
        """Add a block from another level; it keeps its tick."""
        self.moved[block] = tick
        if len(self._heap) > 2 * len(self.moved) + 64:
            self._heap = [(tick, block) for block, tick in self.moved.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (tick, block))

    def take(self, block: int) -> int:
        """Remove a block that moves to another level; return its tick."""
        tick = self.moved.pop(block, None)
        return self.added.pop(block) if tick is None else tick

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove the blocks in `blocks` that are in this order, because they are used again."""
        added, moved = self.added, self.moved
        for block in blocks:
            if added.pop(block, None) is None and moved:
                moved.pop(block, None)

    def pop(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used blocks; there must be that many."""
        if not self.moved:
            return [self.added.popitem(last=False)[0] for _ in range(count)]
        popped: list[int] = []
        for _ in range(count):
            popped.append(self.oldest()[1])
            self.take(popped[-1])
        return popped

    def oldest(self) -> tuple[int, int]:
        """Return (tick, block) of the least recently used block; there must be one."""
        heap, moved = self._heap, self.moved
        while heap and moved.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        first = next(iter(self.added.items()), None)
        if first is None or (heap and heap[0][0] < first[1]):
            return heap[0]
        return first[1], first[0]

    def note_registered(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Do nothing: this order does not depend on digests."""

    def note_shared(self, blocks: Sequence[int]) -> None:
        """Do nothing: this order does not count uses."""

    def note_unregistered(self, blocks: Sequence[int]) -> None:
        """Do nothing: this order has no statistics of blocks."""

    def faults(self) -> Faults:
        """Check the order in small parts; yield each part's fault, or an empty string."""
        for piece in pieces(self.moved):
            yield "a cached block stands twice" if self.added.keys() & piece else ""
        for is_in_order in is_sorted(self.added.values()):
            yield "" if is_in_order else "cached blocks are out of order"
        # The ticks are ascending, so the last block is the youngest.
        newest = next(reversed(self.added.values()), 0)
        yield "a cached block is younger than the pool" if newest > self.num_ticks else ""


DEFAULT_LEVEL = DEFAULT_RETENTION_LEVEL
"""The level of a block that has no claim (see retention.py) and is not held by a session."""


class CachedBlocks:
    """Unused blocks whose content can be reused, each with a level from 0 to 100.

    `order`: the order within the default level.
    """

    def __init__(self, order: EvictionOrder | None = None) -> None:
        # Not `or`: an order without blocks is false.
        self.order: EvictionOrder = RecencyOrder() if order is None else order
        self._others: dict[int, RecencyOrder] = {}
        # Level by block, for blocks that are not at the default level.
        self._level_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.order) + len(self._level_of)

    def __contains__(self, block: int) -> bool:
        return block in self.order or block in self._level_of

    def blocks(self) -> list[int]:
        """Return all cached blocks, unsorted."""
        return [*self.order.blocks(), *self._level_of]

    @property
    def num_special(self) -> int:
        """Number of blocks at a level other than the default."""
        return len(self._level_of)

    def level(self, block: int) -> int:
        """Return the level of a cached block; the default level for any other block."""
        return self._level_of.get(block, DEFAULT_LEVEL)

    def extend(self, blocks: Sequence[int], level: int = DEFAULT_LEVEL) -> None:
        """Add blocks of one chain that are no longer used and not cached yet, the last of the chain
        first.
        """
        if level == DEFAULT_LEVEL:
            self.order.extend(blocks)
            return
        of_level = self._order_of(level)
        of_level.num_ticks = self.order.num_ticks
        of_level.extend(blocks)
        self.order.num_ticks = of_level.num_ticks
        self._level_of.update(dict.fromkeys(blocks, level))

    def move(self, block: int, level: int) -> None:
        """Change the level of a cached block; it keeps its age."""
        old = self.level(block)
        if old == level:
            return
        tick = self._take(block, old)
        if level == DEFAULT_LEVEL:
            self.order.insert(block, tick)
        else:
            self._order_of(level).insert(block, tick)
            self._level_of[block] = level

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove the blocks in `blocks` that are cached, because they are used again."""
        self.order.discard(blocks)
        others = self._level_of
        if others:
            for block in blocks:
                if block in others:
                    self._take(block, others[block])

    def pop(self, count: int) -> list[int]:
        """Remove and return the `count` blocks to evict next; there must be that many."""
        if not self._level_of:
            return self.order.pop(count)
        popped: list[int] = []
        while len(popped) < count:
            lowest = min(self._others, default=DEFAULT_LEVEL)
            is_default = len(self.order) > 0 and lowest >= DEFAULT_LEVEL
            order = self.order if is_default else self._others[lowest]
            evicted = order.pop(min(count - len(popped), len(order)))
            if not is_default:
                self._forget_level(lowest, evicted)
                self.order.note_unregistered(evicted)
            popped += evicted
        return popped

    def faults(self) -> Faults:
        """Check the cached blocks in small parts; yield each part's fault, or an empty string."""
        yield from self.order.faults()
        num_special = 0
        for level, of_level in self._others.items():
            for fault in of_level.faults():
                yield f"level {level}: {fault}" if fault else ""
            if level == DEFAULT_LEVEL or not of_level:
                yield f"level {level} should not be there"
            for blocks in pieces(of_level.blocks()):
                num_special += len(blocks)
                if any(self._level_of.get(b) != level or b in self.order for b in blocks):
                    yield "cached blocks and their levels disagree"
                yield ""
        if num_special != len(self._level_of):
            yield "cached blocks and their levels disagree"

    def _order_of(self, level: int) -> RecencyOrder:
        return self._others.setdefault(level, RecencyOrder())

    def _take(self, block: int, level: int) -> int:
        """Remove a block from its level; return its tick."""
        if level == DEFAULT_LEVEL:
            return self.order.take(block)
        tick = self._others[level].take(block)
        self._forget_level(level, [block])
        return tick

    def _forget_level(self, level: int, blocks: list[int]) -> None:
        """Remove the recorded `level` of `blocks`, because they have left this level."""
        for block in blocks:
            del self._level_of[block]
        if not len(self._others[level]):
            del self._others[level]
