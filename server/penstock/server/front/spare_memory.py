"""Memory that a flood of calls took and nobody needs any more, given back to the system.

Owns when that is worth its while. glibc by itself keeps nearly all of it: what is free lies in
pages between what is not, in an arena for each thread of the gRPC core, and is not returned until
somebody asks. What is large is best kept apart from the start: glibc takes the first of its kind
from the system and the next, having learnt their size, from the arenas. Elsewhere than on glibc
this does nothing.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 8 << 20
"""Growth since the last time that makes it worth another look."""
INTERVAL_S = 2.0
LARGE_BYTES = 256 << 10
"""From here on memory comes from the system and goes back to it at once."""
_M_MMAP_THRESHOLD = -3
_STATM = Path("/proc/self/statm")


class SpareMemory:
    """Says when to `trim`. `rss_bytes` and `now_s` are asked for; None: not known here."""

    def __init__(self, rss_bytes: Callable[[], int | None], clock: Callable[[], float]) -> None:
        self._rss_bytes = rss_bytes
        self._clock = clock
        self._least_bytes = rss_bytes()
        self._next_s = clock() + INTERVAL_S

    def is_worth_trimming(self) -> bool:
        """Whether much more is held than after the last trim, and that was some time ago."""
        if self._least_bytes is None or self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + INTERVAL_S
        now_bytes = self._rss_bytes()
        return now_bytes is not None and now_bytes > self._least_bytes + GROWTH_BYTES

    def note_trimmed(self) -> None:
        """What is held now is needed: measure growth from here."""
        self._least_bytes = self._rss_bytes()


def keep_large_apart() -> None:
    """Once, at a process's start: large messages leave no holes behind."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Give back what is free, some milliseconds of work; for a thread other than the loop's."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def resident_bytes() -> int | None:
    """Memory of this process; None where that is not known, or could not be given back."""
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
