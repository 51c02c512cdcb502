"""Evicts the cached blocks with the fewest expected hits per unit of memory and time.

The value of a block depends on its class and age and is learned from earlier blocks (`HitDensity`).
`HitDensityOrder` evicts blocks with the lowest value first. The class of a block is its number of
uses (use_history.py).

**Value.** The highest rate of hits per tick that a kept block can have (a tick passes when a block
becomes cached, see cached_blocks.py): the maximum, over all ages e up to which it may be kept, of
the expected hits until e divided by the expected number of ticks in the cache until then. This is
the Gittins index of a job that may be abandoned (Gittins, 1979); hit density as the eviction
measure is from LHD (Beckmann, Chen and Cidon, NSDI 2018). LHD averages over the whole time in the
cache; this module maximizes over the stopping age. At the same age, the value of a class is at
least the value of a lower class: blocks used more often are the head of blocks used less often, and
blocks cannot be found without their head. Counts are integers, so the same history gives the same
values on every machine.

**Order.** The blocks of one class that one request releases form a segment: they have the same age
and are evicted from the tail, because the rest of a prefix cannot be found without its head. An
eviction compares the oldest and the newest segment of each class, at most two values per class,
because the value usually falls or rises monotonically with age. Blocks are evicted from the segment
with the lowest value, the oldest segment among equal values, so that without statistics the order
is LRU. The chosen segment gives up to MAX_RUN blocks before the next comparison.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.cached_blocks import EvictionOrder, RecencyOrder
from penstock.scheduler.check_pieces import Faults, is_sorted, pieces
from penstock.scheduler.config import EvictionPolicy, SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.use_history import MAX_USES, UseHistory

NUM_BINS = 48
_FIRST_EDGE = 16
"""Ages below this are one bin; from here on an octave has two bins."""


def bin_of(age: int) -> int:
    """Return the number of the bin, from 0 to NUM_BINS - 1, for an age in ticks."""
    if age < _FIRST_EDGE:
        return 0
    octave = age.bit_length()
    return min(NUM_BINS - 1, 2 * octave - 9 + (age >> (octave - 2) & 1))


def _widths() -> NDArray[np.int64]:
    """Return the number of ticks that each bin spans. The last bin has no upper end, and counts as
    half an octave.
    """
    edges = [0] + [(2 + half) * _FIRST_EDGE << octave for octave in range(24) for half in (0, 1)]
    return np.diff(np.array(edges[: NUM_BINS + 1], dtype=np.int64) // 2)


class HitDensity:
    """Hit statistics of `num_classes` classes of blocks (class: number of uses). The counts are
    halved when they cover more than `half_life` released blocks, so that old ones decay.
    """

    def __init__(self, num_classes: int, half_life: int) -> None:
        self._half_life = half_life
        self._num_unused = [0] * num_classes
        self._hits = [[0] * NUM_BINS for _ in range(num_classes)]
        # [class][bin]: hits per tick of keeping a block; 0 where unknown.
        self.table = [[0.0] * NUM_BINS for _ in range(num_classes)]

    def note_unused(self, kind: int, count: int) -> None:
        """Record that `count` blocks of class `kind` became unused."""
        self._num_unused[kind] += count

    def note_hit(self, kind: int, age: int, count: int = 1) -> None:
        """Record that `count` blocks of class `kind` were used again at `age`, in ticks, or would
        have been if they had been kept.
        """
        self._hits[kind][bin_of(age)] += count

    def refit(self) -> None:
        """Recompute the table of values from the counts, and halve the counts if `half_life` is
        exceeded.
        """
        hits = np.array(self._hits, dtype=np.int64)
        begun = np.array(self._num_unused, dtype=np.int64)[:, None]
        # Of the blocks that began: how many were not hit before each bin, and after it.
        after = np.maximum(begun - hits.cumsum(axis=1), 0)
        before = np.maximum(np.concatenate((begun, after[:, :-1]), axis=1), 0)
        ticks = (before + after) * _WIDTHS
        zero = np.zeros_like(begun)
        hits_to = np.concatenate((zero, hits.cumsum(axis=1)), axis=1)
        ticks_to = np.concatenate((zero, ticks.cumsum(axis=1)), axis=1)
        # [class, from, to]
        gained = hits_to[:, None, 1:] - hits_to[:, :-1, None]
        spent = ticks_to[:, None, 1:] - ticks_to[:, :-1, None]
        is_ahead = _IS_AHEAD & (spent > 0)
        rates = np.where(is_ahead, gained / np.maximum(spent, 1), 0.0)
        # The head of a prefix is used at least as often as its tail, which is useless without the
        # head.
        self.table = np.maximum.accumulate(rates.max(axis=2), axis=0).tolist()
        if int(begun.sum()) > self._half_life:
            self._num_unused = [count // 2 for count in self._num_unused]
            self._hits = [[count // 2 for count in of_class] for of_class in self._hits]


_WIDTHS = _widths()
_IS_AHEAD = np.triu(np.ones((NUM_BINS, NUM_BINS), dtype=np.bool_))


MAX_RUN = 32
REFIT_EVERY = 200
_POOLS_TO_HALF = 64
_POOLS_TO_REMEMBER = 4


class _BlockSegment:
    """Blocks of one class released together. `blocks`: an ordered set, the tail last. `tick`:
    logical time of their release.
    """

    __slots__ = ("blocks", "kind", "tick")

    def __init__(self, blocks: dict[int, None], kind: int, tick: int) -> None:
        self.blocks, self.kind, self.tick = blocks, kind, tick


class HitDensityOrder:
    """An `EvictionOrder` that evicts the blocks with the lowest expected hits per time first (see
    the module's docstring).

    The table of values is recomputed after every `refit_every` calls of `extend`.
    """

    def __init__(self, num_blocks: int, *, refit_every: int = REFIT_EVERY) -> None:
        self.num_ticks = 0
        self._history = UseHistory(num_blocks, max_num_remembered=_POOLS_TO_REMEMBER * num_blocks)
        self._density = HitDensity(MAX_USES + 1, half_life=_POOLS_TO_HALF * num_blocks)
        self._segments: list[OrderedDict[int, _BlockSegment]] = [
            OrderedDict() for _ in range(MAX_USES + 1)
        ]
        # The segment that each block was last added to; look in the segment whether it is still
        # there.
        self._segment_of = [_BlockSegment({}, 0, 0)] * num_blocks
        self._num_in_segments = 0
        # Blocks from other levels: each separately, the oldest represents all.
        self._moved = RecencyOrder()
        self._chosen: _BlockSegment | None = None
        self._num_left_of_choice = 0
        self._refit_every = refit_every
        self._num_until_refit = refit_every

    def __len__(self) -> int:
        return self._num_in_segments + len(self._moved)

    def __contains__(self, block: int) -> bool:
        return block in self._segment_of[block].blocks or block in self._moved

    def blocks(self) -> list[int]:
        """Return all blocks of this order, unsorted."""
        blocks = [block for each in self._segments for one in each.values() for block in one.blocks]
        return blocks + self._moved.blocks()

    def extend(self, blocks: Sequence[int]) -> None:
        """Add released blocks, from the last of their chain to the first, and set their ticks (see
        the module's docstring).
        """
        if not blocks:
            return
        kinds = bytes(map(self._history.uses.__getitem__, blocks))
        if kinds.count(kinds[0]) == len(kinds):
            self._append(blocks, kinds[0])
        else:
            start = 0
            for kind, run in groupby(kinds):
                stop = start + sum(1 for _ in run)
                self._append(blocks[start:stop], kind)
                start = stop
        self._num_until_refit -= 1
        if not self._num_until_refit:
            self._num_until_refit = self._refit_every
            self._density.refit()

    def insert(self, block: int, tick: int) -> None:
        """Add a block from another level; it keeps its tick."""
        self._moved.insert(block, tick)

    def take(self, block: int) -> int:
        """Remove a block that moves to another level; return its tick. The tick of a block in a
        segment is the tick of the segment.
        """
        segment = self._segment_of[block]
        if block not in segment.blocks:
            return self._moved.take(block)
        self._leave(segment, block)
        return segment.tick

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove the blocks in `blocks` that are in this order, because they are used again."""
        segment_of, now = self._segment_of, self.num_ticks
        for block in blocks:
            segment = segment_of[block]
            if block in segment.blocks:
                self._leave(segment, block)
                self._density.note_hit(segment.kind, now - segment.tick)
        if self._moved.moved:
            self._moved.discard(blocks)

    def pop(self, count: int) -> list[int]:
        """Remove and return the `count` blocks to evict next; there must be that many."""
        popped: list[int] = []
        while len(popped) < count:
            popped += self._pop_some(count - len(popped))
        return popped

    def note_registered(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Record the digests of used blocks that were registered, in order of their chain."""
        for known in self._history.register(blocks, digests):
            self._density.note_hit(known.num_uses, self.num_ticks - known.tick, known.num_blocks)

    def note_shared(self, blocks: Sequence[int]) -> None:
        """Record one more use of each of `blocks`. Their digests must be registered. Called before
        `discard`.
        """
        self._history.note_use(blocks)

    def note_unregistered(self, blocks: Sequence[int]) -> None:
        """Discard the use counts of these blocks. They are not in this order: either they were
        evicted from another level, or they are used and their content may be invalid.
        """
        self._history.discard(blocks)

    def _append(self, blocks: Sequence[int], kind: int) -> None:
        """Append a segment of class `kind`; `blocks`: the last of their chain first."""
        tick = self.num_ticks + 1
        segment = _BlockSegment(dict.fromkeys(reversed(blocks)), kind, tick)
        segment_of = self._segment_of
        for block in blocks:
            segment_of[block] = segment
        self._segments[kind][tick] = segment
        self.num_ticks += len(blocks)
        self._num_in_segments += len(blocks)
        self._density.note_unused(kind, len(blocks))

    def _leave(self, segment: _BlockSegment, block: int) -> None:
        del segment.blocks[block]
        self._num_in_segments -= 1
        if not segment.blocks:
            del self._segments[segment.kind][segment.tick]

    def _pop_some(self, max_num: int) -> list[int]:
        """Remove and return 1 to `max_num` blocks of one segment, or one block from another
        level.
        """
        segment = self._chosen
        if segment is None or not segment.blocks or not self._num_left_of_choice:
            segment = self._chosen = self._choose()
            self._num_left_of_choice = MAX_RUN
        if segment is None:
            tick, block = self._moved.oldest()
            self._moved.take(block)
            self._history.evict([block], tick)
            return [block]
        blocks = segment.blocks
        num_blocks = min(max_num, self._num_left_of_choice, len(blocks))
        if num_blocks == len(blocks):
            evicted = [*reversed(blocks)]
            blocks.clear()
            del self._segments[segment.kind][segment.tick]
        else:
            evicted = [blocks.popitem()[0] for _ in range(num_blocks)]
        self._num_left_of_choice -= num_blocks
        self._num_in_segments -= num_blocks
        self._history.evict(evicted, segment.tick)
        return evicted

    def _choose(self) -> _BlockSegment | None:
        """Return the segment to evict from next; None if the oldest of the blocks that came from
        another level is evicted instead.
        """
        table, now = self._density.table, self.num_ticks
        least: tuple[float, int] | None = None
        chosen: _BlockSegment | None = None
        for kind, segments in enumerate(self._segments):
            if not segments:
                continue
            oldest, newest = next(iter(segments)), next(reversed(segments))
            for tick in (oldest,) if oldest == newest else (oldest, newest):
                value = (table[kind][bin_of(now - tick)], tick)
                if least is None or value < least:
                    least, chosen = value, segments[tick]
        if self._moved.moved:
            tick, block = self._moved.oldest()
            value = (table[self._history.uses[block]][bin_of(now - tick)], tick)
            if least is None or value < least:
                return None
        return chosen

    def faults(self) -> Faults:
        """Check the order in small parts; yield each part's fault, or an empty string."""
        yield from self._moved.faults()
        yield "a moved block was added" if self._moved.added else ""
        yield from self._history.faults()
        num_blocks = 0
        for kind, segments in enumerate(self._segments):
            for is_in_order in is_sorted(segments):
                yield "" if is_in_order else "segments are out of order"
            for piece in pieces(self._blocks_of(kind)):
                num_blocks += len(piece)
                yield from self._block_faults(piece, kind)
            for piece in pieces(segments.items()):
                if any(not one.blocks or one.kind != kind or one.tick != at for at, one in piece):
                    yield "a segment is empty or filed under another name"
        if num_blocks != self._num_in_segments:
            yield "the number of cached blocks is wrong"

    def _blocks_of(self, kind: int) -> Iterator[tuple[int, _BlockSegment]]:
        for segment in self._segments[kind].values():
            for block in segment.blocks:
                yield block, segment

    def _block_faults(self, piece: list[tuple[int, _BlockSegment]], kind: int) -> Faults:
        segment_of, uses = self._segment_of, self._history.uses
        is_filed = all(segment_of[block] is segment for block, segment in piece)
        yield "" if is_filed else "cached blocks and their segments disagree"
        is_of_kind = all(uses[block] == kind for block, _ in piece)
        yield "" if is_of_kind else "a cached block stands in another class"


def eviction_order_of(config: SchedulerConfig, info: ExecutorInfo) -> EvictionOrder:
    """Create the eviction order that `config` selects for the block pool of an executor."""
    match config.eviction:
        case EvictionPolicy.HIT_DENSITY:
            return HitDensityOrder(info.num_blocks)
        case EvictionPolicy.LRU:
            return RecencyOrder()
