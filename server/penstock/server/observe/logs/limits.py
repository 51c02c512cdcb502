"""Limits log lines: each place in the code may log a burst of lines, then one line per second.

Contains this rate limit, and a filter for the harmless error that gRPC logs when a client
disconnects before its response is sent. The rate limit never drops lines of level CRITICAL or lines
with `extra=ALWAYS`. Such lines, for example for starts and ends of processes, are few and must be
complete.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_LOGGER: Final = "grpc._cython.cygrpc"
_KIND: Final = "ExecuteBatchError"
_SENDING: Final = frozenset({"_finish_handler_with_unary_response", "_send_message"})
"""The functions of gRPC that send a response of a call."""


class DisconnectErrorFilter(logging.Filter):
    """Drops the error that gRPC logs when a client disconnects before its response is sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for this error, True for all other lines."""
        if record.name != _LOGGER or not record.exc_info:
            return True
        kind, _, traceback = record.exc_info
        if kind is None or kind.__name__ != _KIND:
            return True
        while traceback is not None:
            if traceback.tb_frame.f_code.co_name in _SENDING:
                return False
            traceback = traceback.tb_next
        return True


ALWAYS: Final[dict[str, Any]] = {"is_always_logged": True}
"""The `extra` of a log call whose line is never dropped."""
LEFT_OUT: Final = "num_left_out"
"""Attribute of a log record: the number of lines dropped before it."""

BURST = 10
PER_SECOND = 1.0
MAX_CALL_SITES = 1024

CallSite = tuple[str, str, int]


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float
    num_left_out: int = 0


class RateLimit(logging.Filter):
    """Limits the lines of each place in the code to a burst of BURST, then PER_SECOND per second
    (token bucket). Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._buckets: dict[CallSite, _Bucket] = {}
        # Filters run before the handler takes its lock, so this needs its own lock.
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line above the limit. The next line that passes has the number of
        dropped lines as attribute LEFT_OUT."""
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

    def _bucket_of(self, place: CallSite, now_s: float) -> _Bucket:
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= MAX_CALL_SITES:
                # The code has fewer places. Places generated at run time must not use up memory.
                self._buckets.clear()
            bucket = self._buckets[place] = _Bucket(tokens=BURST, filled_s=now_s)
        return bucket
