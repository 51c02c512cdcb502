"""Gaps between tokens where an engine paces itself: every row has its own.

Owns the times of last tokens, by slot. An engine of ours brings each decode row a token in every
step, so that one number tells the gap of all; one that paces itself brings what it has.
"""

from math import nan

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.slot_arrays import SlotArrays


class TurnGaps:
    """Of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self._last_s: NDArray[np.float64] = np.full(num_slots, nan)
        self._begun: list[int] = []

    def begin(self, slot: int) -> None:
        """Somebody new is in a slot since this turn, or was in it."""
        if slot >= 0:
            self._last_s[slot] = nan
            self._begun.append(slot)

    def measure(
        self, arrays: SlotArrays | None, known: NDArray[np.int32], now: float
    ) -> tuple[float, int]:
        """Mean gap of the slots that got tokens in this turn, NaN for none, and how many they are.

        `known` int32 [S]: tokens of each slot after the turn before.
        """
        if arrays is None:
            return nan, 0
        has_more = arrays.num_tokens > known
        # What was known of such a slot was another's; its first token comes in a later turn.
        has_more[self._begun] = False
        gaps = now - self._last_s[has_more]
        gaps = gaps[~np.isnan(gaps)]
        self._last_s[has_more] = now
        return (float(gaps.mean()), len(gaps)) if len(gaps) else (nan, 0)

    def end_turn(self) -> None:
        """What was known after the turn before is known after this one."""
        self._begun.clear()
