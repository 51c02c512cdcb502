"""Returns freed memory to the operating system after a burst of calls.

Decides when to return it, and calls glibc for that. Each thread of the gRPC core has an arena, in
which glibc keeps nearly all freed memory, because its pages lie between live allocations. Large
blocks should always be mapped separately (`map_large_blocks_separately`): by default glibc maps the
first large block, but then raises its threshold and allocates the next one from an arena. Without
glibc the functions have no effect.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 8 << 20
"""Growth of resident memory since the last trim that causes another trim."""
INTERVAL_S = 2.0
LARGE_BYTES = 256 << 10
"""Blocks above this size are mapped separately, and unmapped when freed."""
_M_MMAP_THRESHOLD = -3
_STATM = Path("/proc/self/statm")


class SpareMemory:
    """Decides when to return free memory to the operating system with `trim`.

    `rss_bytes` returns the resident memory of the process, None if unknown.
    """

    def __init__(self, rss_bytes: Callable[[], int | None], clock: Callable[[], float]) -> None:
        self._rss_bytes = rss_bytes
        self._clock = clock
        self._least_bytes = rss_bytes()
        self._next_s = clock() + INTERVAL_S

    def is_worth_trimming(self) -> bool:
        """Return True if memory has grown by more than GROWTH_BYTES since the last trim.

        Checks at most every INTERVAL_S and returns False in between.
        """
        if self._least_bytes is None or self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + INTERVAL_S
        now_bytes = self._rss_bytes()
        return now_bytes is not None and now_bytes > self._least_bytes + GROWTH_BYTES

    def note_trimmed(self) -> None:
        """Record that memory was trimmed: further growth is measured from the current size."""
        self._least_bytes = self._rss_bytes()


def map_large_blocks_separately() -> None:
    """Make glibc map large blocks separately. Call this once, when the process starts."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Return free memory to the operating system.

    Takes some milliseconds, so it must not run on the thread of the event loop.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if it is unknown or `trim` does nothing."""
    if _malloc_trim is None:
        return None
    try:
        num_pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _function_of_glibc(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


_malloc_trim = _function_of_glibc("malloc_trim")
_mallopt = _function_of_glibc("mallopt")
