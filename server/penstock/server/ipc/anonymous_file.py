"""Creates files in memory, which processes share by their descriptors."""

import os
import tempfile
from pathlib import Path


def anonymous_file(name: str, num_bytes: int) -> int:
    """Return the descriptor of a new file of `num_bytes` zeros, which has no path. `name` is for
    debugging.

    Child processes do not inherit the descriptor unless it is passed explicitly. Raises OSError if
    memory is exhausted.
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
