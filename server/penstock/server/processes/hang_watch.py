"""Hang detection by heartbeat counts.

Counts checks, not seconds: after a pause of the whole machine one check is late, but no process has
hung.
"""

NUM_CHECKS = 10
"""Consecutive checks without a new heartbeat after which a process counts as hung."""


class HangWatch:
    """Watches one supervised process."""

    def __init__(self, num_checks: int = NUM_CHECKS) -> None:
        self._num_checks = num_checks
        self._seen = (-1, -1)
        self._num_same = 0

    @property
    def is_halfway(self) -> bool:
        """True at the one check at half of the limit."""
        return self._num_same == self._num_checks // 2

    def check(self, process_id: int, num_beats: int) -> bool:
        """Check once; return whether `process_id` hangs: its `num_beats` has not changed for too
        long.
        """
        if (process_id, num_beats) != self._seen:
            self._seen = (process_id, num_beats)
            self._num_same = 0
            return False
        self._num_same += 1
        return self._num_same >= self._num_checks

    def forget(self) -> None:
        """Reset, since there is no process to watch."""
        self._seen = (-1, -1)
        self._num_same = 0
