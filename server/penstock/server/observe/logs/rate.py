"""How many log lines of a kind pass: a burst, then one a second, which says how many did not.

Owns the count per place in the code. Lines of level CRITICAL pass always, as do those that are
logged with `extra=ALWAYS`: starts and ends of processes, few of which none may be missing.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

ALWAYS: Final[dict[str, Any]] = {"is_always_logged": True}
"""As `extra` of a log call: this line is never left out."""
LEFT_OUT: Final = "num_left_out"
"""The attribute of a record that tells how many before it were left out."""

BURST = 10
PER_SECOND = 1.0
MAX_PLACES = 1024

Place = tuple[str, str, int]


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float
    num_left_out: int = 0


class RateLimit(logging.Filter):
    """A token bucket for each place that logs. Threads may share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._buckets: dict[Place, _Bucket] = {}
        # Filters run before the handler takes its lock.
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may pass."""
        if record.levelno >= logging.CRITICAL or getattr(record, "is_always_logged", False):
            return True
        now_s = self._clock()
        with self._lock:
            bucket = self._bucket_of((record.name, record.pathname, record.lineno), now_s)
            bucket.tokens = min(BURST, bucket.tokens + (now_s - bucket.filled_s) * PER_SECOND)
            bucket.filled_s = now_s
            if bucket.tokens < 1.0:
                bucket.num_left_out += 1
                return False
            bucket.tokens -= 1.0
            if bucket.num_left_out:
                setattr(record, LEFT_OUT, bucket.num_left_out)
                bucket.num_left_out = 0
            return True

    def _bucket_of(self, place: Place, now_s: float) -> _Bucket:
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= MAX_PLACES:
                # Code has fewer places; whoever makes them up as it goes is not worth the memory.
                self._buckets.clear()
            bucket = self._buckets[place] = _Bucket(tokens=BURST, filled_s=now_s)
        return bucket
