"""Bounds the retries of all calls of one client together.

A bound per call does not bound the total: when a service refuses most calls, four attempts each are
four times the load it could not carry. So retries are paid from a budget that first attempts fill:
the retry budget of Finagle (its user's guide, "Clients") and of "Addressing Cascading Failures" in
*Site Reliability Engineering* (O'Reilly, 2016), here without a clock.
"""

import math
import threading


class RetryBudget:
    """Over any stretch, retries are at most `reserve` and `share` of the calls in it.

    Every call adds `share` of a retry; the budget holds at most `reserve` retries, at least one,
    and begins with `reserve`. Calls from several threads may share one. Raises ValueError.
    """

    def __init__(self, *, share: float = 0.2, reserve: int = 100) -> None:
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"share: must be finite and not negative, not {share}")
        if reserve < 0:
            raise ValueError(f"reserve: must not be negative, not {reserve}")
        self._share = share
        self._most = float(max(reserve, 1))
        self._left = float(reserve)
        self._lock = threading.Lock()

    def pay_in(self) -> None:
        """Count a call."""
        with self._lock:
            self._left = min(self._most, self._left + self._share)

    def take(self) -> bool:
        """Whether one more retry may be made; it is then deducted."""
        with self._lock:
            # Five times a fifth is a little less than one.
            if self._left < 1.0 - 1e-9:
                return False
            self._left -= 1.0
            return True
