"""Cached blocks in the order of their eviction.

Owns the order among levels: the lowest level first. Within the default level an eviction order
decides (eviction_order.py), within the others least recent use: there a request set the value of
its blocks. Does not know a block's content, nor the reason of its level.

A block that changes its level keeps its age: one that returns to the default after a while is
placed among those that were used at the same time, not behind them.
"""

from collections.abc import Sequence

from penstock.scheduler.check_pieces import Faults, pieces
from penstock.scheduler.eviction_order import EvictionOrder, RecencyOrder
from penstock.scheduler.request_options import DEFAULT_RETENTION_PRIORITY

DEFAULT_LEVEL = DEFAULT_RETENTION_PRIORITY
"""The level of a block without a claim."""


class CachedBlocks:
    """Unused blocks whose content is known, each with a level from 0 to 100.

    `order`: of the default level.
    """

    def __init__(self, order: EvictionOrder | None = None) -> None:
        # Not `or`: an order without blocks is false.
        self.order: EvictionOrder = RecencyOrder() if order is None else order
        self._others: dict[int, RecencyOrder] = {}
        # Of every block that is not at the default level.
        self._level_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.order) + len(self._level_of)

    def __contains__(self, block: int) -> bool:
        return block in self.order or block in self._level_of

    def blocks(self) -> list[int]:
        """All of them, unordered."""
        return [*self.order.blocks(), *self._level_of]

    @property
    def num_special(self) -> int:
        """Blocks at another level than the default."""
        return len(self._level_of)

    def level(self, block: int) -> int:
        """The level of a cached block."""
        return self._level_of.get(block, DEFAULT_LEVEL)

    def extend(self, blocks: Sequence[int], level: int = DEFAULT_LEVEL) -> None:
        """Blocks of one chain that were used until now and are not cached yet, tail first."""
        if level == DEFAULT_LEVEL:
            self.order.extend(blocks)
            return
        of_level = self._of(level)
        of_level.num_turns = self.order.num_turns
        of_level.extend(blocks)
        self.order.num_turns = of_level.num_turns
        self._level_of.update(dict.fromkeys(blocks, level))

    def move(self, block: int, level: int) -> None:
        """Change the level of a cached block; it keeps its age."""
        old = self.level(block)
        if old == level:
            return
        turn = self._take(block, old)
        if level == DEFAULT_LEVEL:
            self.order.insert(block, turn)
        else:
            self._of(level).insert(block, turn)
            self._level_of[block] = level

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove those of `blocks` that are cached: they are used again."""
        self.order.discard(blocks)
        others = self._level_of
        if others:
            for block in blocks:
                if block in others:
                    self._take(block, others[block])

    def pop(self, count: int) -> list[int]:
        """Remove the `count` blocks that are evicted next; there must be as many."""
        if not self._level_of:
            return self.order.pop(count)
        popped: list[int] = []
        while len(popped) < count:
            lowest = min(self._others, default=DEFAULT_LEVEL)
            is_default = len(self.order) > 0 and lowest >= DEFAULT_LEVEL
            order = self.order if is_default else self._others[lowest]
            gone = order.pop(min(count - len(popped), len(order)))
            if not is_default:
                self._forget_level(lowest, gone)
                self.order.note_lost(gone)
            popped += gone
        return popped

    def faults(self) -> Faults:
        """Inconsistencies of the account, piece by piece."""
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

    def _of(self, level: int) -> RecencyOrder:
        return self._others.setdefault(level, RecencyOrder())

    def _take(self, block: int, level: int) -> int:
        """Remove a block from its level; returns the turn at which it was added."""
        if level == DEFAULT_LEVEL:
            return self.order.take(block)
        turn = self._others[level].take(block)
        self._forget_level(level, [block])
        return turn

    def _forget_level(self, level: int, blocks: list[int]) -> None:
        """`blocks` have left `level`."""
        for block in blocks:
            del self._level_of[block]
        if not len(self._others[level]):
            del self._others[level]
