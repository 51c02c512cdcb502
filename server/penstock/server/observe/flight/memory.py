"""The memory that a flight recorder writes to: nameless, shared, and there when its writer is not.

Owns how it is made and mapped. Whoever holds the file descriptor has it; an engine that is killed
takes nothing of it along.
"""

import mmap
import os
import tempfile
from pathlib import Path

from penstock.server.observe.flight.geometry import (
    HEADER_BYTES,
    SIZES,
    SIZES_OFFSET,
    FlightError,
    Geometry,
)
from penstock.server.observe.flight.layout import LAYOUT_VERSION, MAGIC


def create_memory(num_steps: int, name: str) -> int:
    """A new memory for the last `num_steps` steps, a power of two; its file descriptor.

    Not inherited unless it is handed on. Raises FlightError for a size that it cannot have, OSError
    when there is no memory for it.
    """
    geometry = Geometry.of_steps(num_steps)
    fd = _nameless_file(name)
    try:
        os.ftruncate(fd, geometry.num_bytes)
        sizes = SIZES.pack(LAYOUT_VERSION, HEADER_BYTES, *geometry.num_rows, 0)
        os.pwrite(fd, sizes, SIZES_OFFSET)
        os.pwrite(fd, MAGIC, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, *, is_writer: bool = False) -> tuple[mmap.mmap, Geometry]:
    """The memory of a descriptor, which may be closed then. Raises FlightError, OSError."""
    num_bytes = os.fstat(fd).st_size
    if num_bytes < HEADER_BYTES:
        raise FlightError("is not a flight recording")
    access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
    mapped = mmap.mmap(fd, num_bytes, access=access)
    try:
        return mapped, Geometry.of_header(mapped[:HEADER_BYTES], num_bytes)
    except FlightError:
        mapped.close()
        raise


def _nameless_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # Not Linux: a file that nobody finds, in memory where the system keeps such files there.
    fd, path = tempfile.mkstemp(prefix=f"{name}-")
    Path(path).unlink()
    return fd
