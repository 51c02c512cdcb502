"""Expected hits of a cached block per turn that it stays, learned from earlier blocks.

Owns the counts and the table computed from them. Does not know blocks: it gets the starts of
residencies by class, and the ages at which some ended in a hit.

The value of a block of some class and age is the best rate of hits per turn of cache that keeping
it a while can have: over all ages e to which it may be kept, the hits expected until e divided by
the turns that it is expected to occupy until then. This is the Gittins index of a job that may be
abandoned (Gittins, 1979); hit density as the measure of eviction is LHD's (Beckmann, Chen and
Cidon, NSDI 2018), which averages to the end of a residency where this takes the best stop.

A class is worth no less than a lower one of the same age: blocks used more often are the head of
those used less often, which cannot be found without it.

Counts are integers, so the same history gives the same table everywhere.
"""

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 48
_FIRST_EDGE = 16
"""Ages below are one bin; from there on there are two to an octave."""


def bin_of(age: int) -> int:
    """The bin of an age in turns."""
    if age < _FIRST_EDGE:
        return 0
    octave = age.bit_length()
    return min(NUM_BINS - 1, 2 * octave - 9 + (age >> (octave - 2) & 1))


def _widths() -> NDArray[np.int64]:
    """Turns that each bin spans; the last is open and counted as half an octave too."""
    edges = [0] + [(2 + half) * _FIRST_EDGE << octave for octave in range(24) for half in (0, 1)]
    return np.diff(np.array(edges[: NUM_BINS + 1], dtype=np.int64) // 2)


class HitDensity:
    """Counts of `num_classes` classes; they are halved whenever they contain `half_life`
    residencies, so that old ones decay.
    """

    def __init__(self, num_classes: int, half_life: int) -> None:
        self._half_life = half_life
        self._begun = [0] * num_classes
        self._hits = [[0] * NUM_BINS for _ in range(num_classes)]
        # [class][bin]: hits per turn of keeping a block; 0 where unknown.
        self.table = [[0.0] * NUM_BINS for _ in range(num_classes)]

    def begin(self, kind: int, count: int) -> None:
        """`count` blocks of class `kind` became unused."""
        self._begun[kind] += count

    def hit(self, kind: int, age: int, count: int = 1) -> None:
        """`count` blocks of class `kind` were hit at `age`, or would have been."""
        self._hits[kind][bin_of(age)] += count

    def refit(self) -> None:
        """Recompute the table from the counts."""
        hits = np.array(self._hits, dtype=np.int64)
        begun = np.array(self._begun, dtype=np.int64)[:, None]
        # Of those that began: how many have not been found before a bin, and after it.
        after = np.maximum(begun - hits.cumsum(axis=1), 0)
        before = np.maximum(np.concatenate((begun, after[:, :-1]), axis=1), 0)
        turns = (before + after) * _WIDTHS
        zero = np.zeros_like(begun)
        hits_to = np.concatenate((zero, hits.cumsum(axis=1)), axis=1)
        turns_to = np.concatenate((zero, turns.cumsum(axis=1)), axis=1)
        # [class, from, to]
        gained = hits_to[:, None, 1:] - hits_to[:, :-1, None]
        spent = turns_to[:, None, 1:] - turns_to[:, :-1, None]
        is_ahead = _IS_AHEAD & (spent > 0)
        rates = np.where(is_ahead, gained / np.maximum(spent, 1), 0.0)
        # The head of a prefix was used no less often than its tail, which is lost without it.
        self.table = np.maximum.accumulate(rates.max(axis=2), axis=0).tolist()
        if int(begun.sum()) > self._half_life:
            self._begun = [count // 2 for count in self._begun]
            self._hits = [[count // 2 for count in of_class] for of_class in self._hits]


_WIDTHS = _widths()
_IS_AHEAD = np.triu(np.ones((NUM_BINS, NUM_BINS), dtype=np.bool_))
