"""Reads files that may be replaced while the service runs, and detects when they change.

A change is detected by polling, because Kubernetes updates a mounted folder by replacing a symlink,
and this sends no notification. The content of the files is not interpreted here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

Stamp = tuple[tuple[int, int, int, int] | None, ...]
"""Device, inode, size and modification time of each file; None for an unreadable file."""

MAX_FILE_BYTES: Final = 4 << 20


class FilesChanged(OSError):
    """One of the files changed while they were read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        names = " and ".join(str(path) for path in paths)
        super().__init__(f"{names}: being written while it was read")


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Return a value that changes when one of the files is replaced, modified or removed."""
    return tuple(_stamp(path) for path in paths)


def read_together(paths: Sequence[Path]) -> tuple[tuple[bytes, ...], Stamp]:
    """Return the bytes of the files and their stamp.

    Raises FilesChanged if the stamp changed while they were read, OSError if a file cannot be read,
    and ValueError for a file above MAX_FILE_BYTES.
    """
    before = stamp_of(paths)
    contents = tuple(_read(path) for path in paths)
    if stamp_of(paths) != before:
        raise FilesChanged(paths)
    return contents, before


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data
