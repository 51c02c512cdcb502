"""Writes a flight recording of a running or ended engine to a file.

Owns the folder, the names, the permissions and the number of kept files.
"""

import contextlib
import os
import re
import stat
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from penstock.server.observe.flight.reader import FlightReader

MAX_NUM_FILES = 8
"""Kept files per service and reason, so that frequent dumps do not replace those of crashes."""
MAX_NUM_ALL_FILES = 64
_PREFIX, _SUFFIX, _PARTIAL = "penstock-flight-", ".bin", ".part"
_MAX_WHY_CHARS = 40
_MAX_PARTIAL_AGE_S = 60.0
"""Age in seconds at which an unchanged partial file counts as abandoned."""


def default_folder() -> Path:
    """This user's folder in the system's temporary directory."""
    return Path(tempfile.gettempdir()) / f"penstock-flight-{os.geteuid()}"


def dump(memory: int, folder: Path | None, why: str, *, port: int | None = None) -> Path:
    """Write the memory of a descriptor to a new file of `folder`; None: `default_folder`.

    Only the owner may read the file, and it is written atomically. `port` (of the service, since
    several may share a folder) and `why` become parts of the name: the newest `MAX_NUM_FILES` of
    each pair are kept, `MAX_NUM_ALL_FILES` in all. Raises FlightError if no engine has written yet,
    OSError (PermissionError for a default folder of another user) if it cannot be written.
    """
    reader = FlightReader(memory)
    try:
        data = reader.copy(time.monotonic())
    finally:
        reader.close()
    folder = own_default_folder() if folder is None else folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _forget_partial(folder)
    path = folder / _name(port, why)
    _write(path, data)
    _forget_old(folder)
    return path


def own_default_folder() -> Path:
    """The default folder, created if missing.

    Raises PermissionError if the path belongs to another user: the directory is world-writable.
    """
    folder = default_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _name(port: int | None, why: str) -> str:
    reason = re.sub(r"[^a-z0-9]+", "-", why.lower()).strip("-")[:_MAX_WHY_CHARS] or "asked"
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    whose = "" if port is None else f"{port}-"
    return f"{_PREFIX}{at}-{whose}{reason}{_SUFFIX}"


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(partial, flags, 0o600)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _forget_old(folder: Path) -> None:
    # Names sort by time.
    files = sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}"))
    kinds: dict[str, list[Path]] = {}
    for path in files:
        _, _, kind = path.name.removeprefix(_PREFIX).partition("-")
        kinds.setdefault(kind, []).append(path)
    old = set(files[:-MAX_NUM_ALL_FILES])
    old.update(path for alike in kinds.values() for path in alike[:-MAX_NUM_FILES])
    for path in old:
        path.unlink(missing_ok=True)


def _forget_partial(folder: Path) -> None:
    """Remove partial files of processes that were killed while writing."""
    now_s = time.time()
    for path in folder.glob(f".{_PREFIX}*{_SUFFIX}{_PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):  # another process removed or finished it
            if now_s - path.stat().st_mtime > _MAX_PARTIAL_AGE_S:
                path.unlink()
