"""Detects hanging processes from their heartbeat counts.

Counts checks instead of seconds. If the machine was paused (suspended), only one check is late, so
no process is considered hung.
"""

NUM_CHECKS = 10
"""Number of consecutive checks without a new heartbeat after which a process is considered hung."""


class HangWatch:
    """Detects from heartbeat counts whether one supervised process hangs."""

    def __init__(self, num_checks: int = NUM_CHECKS) -> None:
        self._num_checks = num_checks
        self._seen = (-1, -1)
        self._num_same = 0

    @property
    def is_halfway(self) -> bool:
        """True after the check that reaches half of the limit, until the next check."""
        return self._num_same == self._num_checks // 2

    def check(self, instance: int, num_heartbeats: int) -> bool:
        """Return True if the process hangs, i.e. if `num_heartbeats` has not changed in the last
        `num_checks` checks.

        `instance` is a number that differs after each restart: the engine's epoch or the front id.
        A new number starts the count again.
        """
        if (instance, num_heartbeats) != self._seen:
            self._seen = (instance, num_heartbeats)
            self._num_same = 0
            return False
        self._num_same += 1
        return self._num_same >= self._num_checks

    def reset(self) -> None:
        """Reset the count, because there is no process to watch."""
        self._seen = (-1, -1)
        self._num_same = 0
