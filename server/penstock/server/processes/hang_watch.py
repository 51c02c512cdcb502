"""Whether a process still comes round, judged by a count that it raises.

Owns the counting of looks. Looks are counted and not seconds: when the whole machine was paused,
one look is late and nobody has hung.
"""

NUM_LOOKS = 10
"""So many looks in a row without a change mean that it hangs."""


class HangWatch:
    """Of one place, whoever is in it."""

    def __init__(self, num_looks: int = NUM_LOOKS) -> None:
        self._num_looks = num_looks
        self._seen = (-1, -1)
        self._num_same = 0

    @property
    def is_halfway(self) -> bool:
        """True at the one look that is half of what it takes."""
        return self._num_same == self._num_looks // 2

    def look(self, who: int, num_beats: int) -> bool:
        """True when it hangs. `who` tells a process from its successor, `num_beats` grows."""
        if (who, num_beats) != self._seen:
            self._seen = (who, num_beats)
            self._num_same = 0
            return False
        self._num_same += 1
        return self._num_same >= self._num_looks

    def forget(self) -> None:
        """There is nobody to look at."""
        self._seen = (-1, -1)
        self._num_same = 0
