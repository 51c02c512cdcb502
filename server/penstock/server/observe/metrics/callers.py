"""Who is connected to the metrics port: how many, for how long, and who has a seat.

Owns the bounds. A connection takes none of the few seats before all its question is there, so that
clients that connect and send nothing keep no other out. Does not know what is asked or answered.
"""

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

MAX_CALLS: Final = 8
"""Calls that are answered at a time."""
MAX_OTHER_CALLS: Final = 6
"""Calls at which only scrapes are still let in: the page does not keep a scraper out."""
MAX_SILENT: Final = 64
"""Connections whose question is not there yet; the oldest makes room for one more."""
MAX_ASKING_S: Final = 2.0
"""How long a question may take to arrive, however slowly it is sent."""
MAX_CALL_S: Final = 10.0
"""How long an answer may take to be made and read, however slowly its client reads."""

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
        """It is connected. It must `leave`, whatever becomes of it."""
        with self._lock:
            if len(self._silent_since_s) >= MAX_SILENT:
                oldest = next(iter(self._silent_since_s))
                del self._silent_since_s[oldest]
                _hang_up(oldest)
            self._silent_since_s[caller] = self._clock()

    def take_seat(self, caller: socket.socket, *, is_scrape: bool) -> bool:
        """It has asked. False if no seat is free, or it was hung up on; it is still to leave."""
        max_calls = MAX_CALLS if is_scrape else MAX_OTHER_CALLS
        with self._lock:
            if caller not in self._silent_since_s or len(self._seated_since_s) >= max_calls:
                return False
            del self._silent_since_s[caller]
            self._seated_since_s[caller] = self._clock()
            return True

    def leave(self, caller: socket.socket) -> None:
        """Its thread is done with it."""
        with self._lock:
            self._silent_since_s.pop(caller, None)
            self._seated_since_s.pop(caller, None)

    def hang_up_late(self) -> None:
        """Hang up on who takes too long; their threads then end by themselves."""
        now_s = self._clock()
        with self._lock:
            silent = _older(self._silent_since_s, now_s - MAX_ASKING_S)
            for caller in silent:
                del self._silent_since_s[caller]
            # Who has a seat keeps it until its thread is done: that is what seats count.
            for caller in (*silent, *_older(self._seated_since_s, now_s - MAX_CALL_S)):
                _hang_up(caller)

    def hang_up_all(self) -> None:
        """End every call."""
        with self._lock:
            for caller in (*self._silent_since_s, *self._seated_since_s):
                _hang_up(caller)


def _older(since_s: dict[socket.socket, float], limit_s: float) -> list[socket.socket]:
    return [caller for caller, begun_s in since_s.items() if begun_s < limit_s]


def _hang_up(caller: socket.socket) -> None:
    try:
        caller.shutdown(socket.SHUT_RDWR)
    except OSError:
        _log.debug("already hung up")
