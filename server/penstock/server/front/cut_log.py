"""Says which readers were cut, at most once a second: many that hang together are one event.

Owns the count of those that were not named. Does not know why a reader is cut.
"""

import logging
import math

INTERVAL_S = 1.0


class CutLog:
    """A warning names its reader; who follows within a second is counted, and told afterwards."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_s = -math.inf
        self._num_untold: int = 0

    def tell(self, now_s: float, who: str, why: str, extra: dict[str, str]) -> None:
        """A reader was cut at `now_s`, monotonic seconds that do not go back."""
        if now_s < self._last_s + INTERVAL_S:
            self._num_untold += 1
            self._log.debug("%s: reader stalled and was cut: %s", who, why, extra=extra)
            return
        self.tell_rest(now_s)
        self._last_s = now_s
        self._log.warning("%s: reader stalled and was cut: %s", who, why, extra=extra)

    def tell_rest(self, now_s: float) -> None:
        """Tell of those that were not named, once their second is over."""
        if self._num_untold and now_s >= self._last_s + INTERVAL_S:
            self._log.warning(
                "%d more readers stalled and were cut in the last %.1f s",
                self._num_untold,
                now_s - self._last_s,
            )
            self._num_untold = 0
