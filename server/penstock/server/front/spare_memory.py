"""Returns freed memory to the system after a flood of calls.

Owns when trimming is worth its cost. glibc keeps nearly all freed memory, in pages between live
allocations, in an arena for each thread of the gRPC core. Large blocks are best mapped separately
from the start: glibc maps the first one from the system, but adapts its threshold and puts the next
into an arena. A no-op without glibc.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 8 << 20
"""Growth since the last trim that justifies another trim."""
INTERVAL_S = 2.0
LARGE_BYTES = 256 << 10
"""Larger blocks are mapped from the system and unmapped when freed."""
_M_MMAP_THRESHOLD = -3
_STATM = Path("/proc/self/statm")


class SpareMemory:
    """Decides when to `trim`. `rss_bytes` returns None where the size is not known."""

    def __init__(self, rss_bytes: Callable[[], int | None], clock: Callable[[], float]) -> None:
        self._rss_bytes = rss_bytes
        self._clock = clock
        self._least_bytes = rss_bytes()
        self._next_s = clock() + INTERVAL_S

    def is_worth_trimming(self) -> bool:
        """Return whether memory grew by GROWTH_BYTES; checked at most every INTERVAL_S."""
        if self._least_bytes is None or self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + INTERVAL_S
        now_bytes = self._rss_bytes()
        return now_bytes is not None and now_bytes > self._least_bytes + GROWTH_BYTES

    def note_trimmed(self) -> None:
        """Measure growth from the current size on."""
        self._least_bytes = self._rss_bytes()


def keep_large_apart() -> None:
    """Give large blocks separate mappings; call once, when the process starts."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Return free memory to the system. Takes some milliseconds: call on another thread than the
    loop's.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def resident_bytes() -> int | None:
    """Return the memory of this process; None if that is unknown, or memory cannot be returned."""
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
