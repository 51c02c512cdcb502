"""Memory is returned to the operating system after large growth, and only then."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from penstock.server.front.spare_memory import (
    GROWTH_BYTES,
    INTERVAL_S,
    SpareMemory,
    resident_bytes,
    trim,
)


class Machine:
    """A process whose memory and time the test sets."""

    def __init__(self) -> None:
        self.rss: int | None = 100 << 20
        self.now_s = 50.0
        self.spare = SpareMemory(lambda: self.rss, lambda: self.now_s)

    def after(self, duration_s: float, growth: int) -> bool:
        self.now_s += duration_s
        assert self.rss is not None
        self.rss += growth
        return self.spare.is_worth_trimming()


def test_growth_of_memory_is_checked_at_intervals() -> None:
    machine = Machine()
    assert not machine.after(INTERVAL_S, GROWTH_BYTES)
    assert not machine.after(0.0, 1), "just looked"
    assert machine.after(INTERVAL_S, 0)


def test_after_a_trim_growth_counts_from_the_remaining_memory() -> None:
    machine = Machine()
    assert machine.after(INTERVAL_S, 2 * GROWTH_BYTES)
    machine.spare.note_trimmed()
    assert not machine.after(INTERVAL_S, GROWTH_BYTES)
    assert machine.after(INTERVAL_S, 1)


def test_memory_is_not_trimmed_if_its_size_is_unknown() -> None:
    machine = Machine()
    machine.rss = None
    spare = SpareMemory(lambda: machine.rss, lambda: machine.now_s)
    machine.now_s += INTERVAL_S
    machine.rss = 1 << 40
    assert not spare.is_worth_trimming()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_this_process_has_memory_and_can_be_trimmed() -> None:
    before = resident_bytes()
    assert before is None or before > 1 << 20
    trim()


_WHERE_LARGE_BLOCKS_LIE = """
import ctypes, sys
from penstock.server.front.spare_memory import LARGE_BYTES, map_large_blocks_separately

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

class Information(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]

libc.mallinfo2.restype = Information
if sys.argv[1] == "apart":
    map_large_blocks_separately()
# The first that is freed teaches glibc its size.
libc.free(libc.malloc(16 * LARGE_BYTES))
before = libc.mallinfo2().hblks
libc.malloc(4 * LARGE_BYTES)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
@pytest.mark.parametrize(("how", "num_apart"), [("apart", 1), ("as glibc does it", 0)])
def test_large_blocks_come_from_the_system_one_by_one(how: str, num_apart: int) -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("not on glibc, or on one older than 2.33")
    command = [sys.executable, "-c", _WHERE_LARGE_BLOCKS_LIE, how]
    reported = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert int(reported.stdout) == num_apart
