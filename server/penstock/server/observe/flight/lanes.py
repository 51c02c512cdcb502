"""Lanes for intervals that overlap: as few as were open at once.

Owns the assignment (greedy interval partitioning: intervals in order of their start, each to the
lane that has been free the longest).
"""

import heapq


class Lanes:
    """Grows as it must."""

    def __init__(self) -> None:
        self.num = 0
        self._busy_until: list[tuple[float, int]] = []

    def take(self, start_s: float, end_s: float) -> int:
        """A lane for this interval, from 0; intervals come in order of their start.

        A nanosecond lies between two on one lane, which is as short as anything is drawn.
        """
        until_s = max(end_s, start_s) + 2e-9
        if self._busy_until and self._busy_until[0][0] <= start_s:
            _, lane = heapq.heapreplace(self._busy_until, (until_s, self._busy_until[0][1]))
            return lane
        lane = self.num
        self.num += 1
        heapq.heappush(self._busy_until, (until_s, lane))
        return lane
