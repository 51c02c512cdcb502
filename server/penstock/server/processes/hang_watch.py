"""Hang detection by heartbeat counts.

Counts checks, not seconds: when the whole machine was paused, one check is late and no process has
hung.
"""

NUM_CHECKS = 10
"""So many checks in a row without a new beat mean that a process hangs."""


class HangWatch:
    """Watches one supervised process."""

    def __init__(self, num_checks: int = NUM_CHECKS) -> None:
        self._num_checks = num_checks
        self._seen = (-1, -1)
        self._num_same = 0

    @property
    def is_halfway(self) -> bool:
        """True at the one check that is half of the limit."""
        return self._num_same == self._num_checks // 2

    def check(self, process_id: int, num_beats: int) -> bool:
        """Check once; True when `process_id` hangs, whose `num_beats` must grow."""
        if (process_id, num_beats) != self._seen:
            self._seen = (process_id, num_beats)
            self._num_same = 0
            return False
        self._num_same += 1
        return self._num_same >= self._num_checks

    def forget(self) -> None:
        """Reset: there is no process to watch."""
        self._seen = (-1, -1)
        self._num_same = 0
