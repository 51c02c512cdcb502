"""The C allocator's settings for a process that runs steps on the CPU.

A step allocates and frees temporaries of several megabytes. By default glibc returns such blocks to
the kernel at once and page-faults them in again in the next step, which can cost more than the
arithmetic. Process-wide and idempotent; a no-op with another C library.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 1 << 30
_TRIM_THRESHOLD_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Configure glibc to keep freed blocks for the next step; False where that does not apply."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    is_kept: bool = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1
    is_kept &= mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES) == 1
    return is_kept
