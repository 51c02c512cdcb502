"""Logs the progress of loading a model's weights."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_REPORT_EVERY_S = 2.0
_MIB = 1 << 20
_GIB = 1 << 30


class LoadProgress:
    """Logs how many of `total` bytes are processed, at most every two seconds; `finish` logs the
    time taken.

    `action`: the start of each log line.
    """

    def __init__(
        self, action: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._action = action
        self._total = total
        self._clock = clock
        self._begun_s = self._reported_s = clock()
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """Add `num_bytes` to the number of processed bytes."""
        self._done += num_bytes
        now_s = self._clock()
        if now_s - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now_s
            done, total = self._done / _GIB, self._total / _GIB
            logger.info("%s: %.1f of %.1f GiB", self._action, done, total)

    def finish(self) -> None:
        """Log the total size and the seconds since the object was created."""
        taken_s = self._clock() - self._begun_s
        logger.info("%s: %s in %.1f s", self._action, size(self._total), taken_s)


def size(num_bytes: int) -> str:
    """Format a size with its unit, such as "903 MiB"."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    return f"{num_bytes / _MIB:.0f} MiB"
