"""Creates files in memory. Processes share these files by their descriptors."""

import os
import tempfile
from pathlib import Path


def anonymous_file(name: str, num_bytes: int) -> int:
    """Create a file without a path that contains `num_bytes` zeros, and return its descriptor.
    `name` is for debugging.

    Child processes do not inherit the descriptor unless it is passed explicitly. Raises OSError if
    a file of this size cannot be created.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        # Without memfd (not Linux): an unlinked file, which is in memory if the temporary folder
        # is.
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        Path(path).unlink()
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd
