"""Limits the total number of retries of all calls of one client.

A limit per call does not limit the total: when a service rejects most calls, four attempts for each
are four times the load that it could not handle. Retries therefore use a budget that first attempts
fill: the retry budget of Finagle (its user's guide, "Clients") and of "Addressing Cascading
Failures" in *Site Reliability Engineering* (O'Reilly, 2016), here without a clock.
"""

import math
import threading


class RetryBudget:
    """Limits retries over any period to max(`reserve`, 1) plus `share` of the calls in this period.

    The budget starts with `reserve` retries. Each call adds `share` of a retry, but the budget
    never has more than max(`reserve`, 1). Thread-safe. Raises ValueError for a negative `reserve`,
    and for a `share` that is negative or not finite.
    """

    def __init__(self, *, share: float = 0.2, reserve: int = 100) -> None:
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"share: must be finite and not negative, not {share}")
        if reserve < 0:
            raise ValueError(f"reserve: must not be negative, not {reserve}")
        self._share = share
        self._max_retries = float(max(reserve, 1))
        self._num_retries = float(reserve)
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """Add the share of one call to the budget."""
        with self._lock:
            self._num_retries = min(self._max_retries, self._num_retries + self._share)

    def withdraw(self) -> bool:
        """Deduct one retry. Returns False if the budget has none."""
        with self._lock:
            # In floating point, five times a fifth may be slightly less than one.
            if self._num_retries < 1.0 - 1e-9:
                return False
            self._num_retries -= 1.0
            return True
