"""A file of whole lines that nobody but its owner reads, bounded in size.

Owns names, modes and what is left behind when a disk is full. Does not know what the lines say.
"""

import os
from collections.abc import Sequence
from pathlib import Path

_MAX_NUM_PAIRS = 100_000


class RecordFile:
    """A new file of `path`, mode 0600. Raises OSError (FileExistsError) when it cannot be made."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        # O_EXCL: never somebody else's file, nor what a link of that name points to.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.is_full = False

    def write(self, lines: Sequence[str]) -> None:
        """Append these lines; from the first on that does not fit, `is_full` and nothing more.

        Raises OSError when the disk does not take them; then too the file ends with a whole line.
        """
        taken: list[bytes] = []
        room = self._max_bytes - self._num_bytes
        for line in lines:
            data = line.encode() + b"\n"
            if self.is_full or len(data) > room:
                self.is_full = True
                break
            room -= len(data)
            taken.append(data)
        if taken:
            self._append(b"".join(taken))

    def close(self) -> None:
        """Finish the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            written = data[: len(data) - len(rest)]
            self._num_bytes += written.rfind(b"\n") + 1
            os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes += len(data)


def open_pair(
    folder: Path, names: tuple[str, str], max_bytes: int
) -> tuple[RecordFile, RecordFile]:
    """New files `<name>.jsonl`, or `<name>-2.jsonl` and so on: both of the first free number.

    `folder` is made, for its owner only, where it is missing. Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(1, _MAX_NUM_PAIRS):
        suffix = "" if number == 1 else f"-{number}"
        paths = [folder / f"{name}{suffix}.jsonl" for name in names]
        if any(os.path.lexists(path) for path in paths):
            continue
        first = RecordFile(paths[0], max_bytes)
        try:
            return first, RecordFile(paths[1], max_bytes)
        except OSError:
            first.close()
            paths[0].unlink()
            raise
    raise FileExistsError(f"{folder} holds {_MAX_NUM_PAIRS} records already")
