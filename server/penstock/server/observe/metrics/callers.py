"""Connections of the metrics port: their number, their time limits, and the slots for requests.

Owns the bounds. A connection takes a slot only when its request is complete, so that idle
connections do not block others. Does not know requests or responses.
"""

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

MAX_CALLS: Final = 8
"""Requests that are handled concurrently."""
MAX_OTHER_CALLS: Final = 6
"""Number of requests at which only scrapes are accepted, so that the page does not block them."""
MAX_SILENT: Final = 64
"""Connections without a complete request; beyond it the oldest is closed."""
MAX_ASKING_S: Final = 2.0
"""Time limit for a request to arrive, in seconds."""
MAX_CALL_S: Final = 10.0
"""Time limit for a response to be made and read, in seconds."""

_log = logging.getLogger(__name__)


class Callers:
    """The connections of one server. Safe to use from any thread. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Both in order of time, oldest first.
        self._silent_since_s: dict[socket.socket, float] = {}
        self._seated_since_s: dict[socket.socket, float] = {}

    def come(self, caller: socket.socket) -> None:
        """Register a connection; call `leave` at its end in every case."""
        with self._lock:
            if len(self._silent_since_s) >= MAX_SILENT:
                oldest = next(iter(self._silent_since_s))
                del self._silent_since_s[oldest]
                _hang_up(oldest)
            self._silent_since_s[caller] = self._clock()

    def take_seat(self, caller: socket.socket, *, is_scrape: bool) -> bool:
        """Take a slot for a complete request. False if none is free or it was disconnected."""
        max_calls = MAX_CALLS if is_scrape else MAX_OTHER_CALLS
        with self._lock:
            if caller not in self._silent_since_s or len(self._seated_since_s) >= max_calls:
                return False
            del self._silent_since_s[caller]
            self._seated_since_s[caller] = self._clock()
            return True

    def leave(self, caller: socket.socket) -> None:
        """Remove a connection whose thread is done."""
        with self._lock:
            self._silent_since_s.pop(caller, None)
            self._seated_since_s.pop(caller, None)

    def hang_up_late(self) -> None:
        """Disconnect connections beyond their time limit; their threads then end."""
        now_s = self._clock()
        with self._lock:
            silent = _older(self._silent_since_s, now_s - MAX_ASKING_S)
            for caller in silent:
                del self._silent_since_s[caller]
            # A slot is held until the thread is done: slots count threads.
            for caller in (*silent, *_older(self._seated_since_s, now_s - MAX_CALL_S)):
                _hang_up(caller)

    def hang_up_all(self) -> None:
        """Close every connection."""
        with self._lock:
            for caller in (*self._silent_since_s, *self._seated_since_s):
                _hang_up(caller)


def _older(since_s: dict[socket.socket, float], limit_s: float) -> list[socket.socket]:
    return [caller for caller, begun_s in since_s.items() if begun_s < limit_s]


def _hang_up(caller: socket.socket) -> None:
    try:
        caller.shutdown(socket.SHUT_RDWR)
    except OSError:
        _log.debug("already disconnected")
