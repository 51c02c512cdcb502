"""Reads a flight record: the memory while an engine writes to it, a copy of it, or a file.

Readers never get partial rows: counts are read before and after the rows are copied, and rows that
may have been overwritten are dropped. Readers never block the writer.

Also manages the files that are written for a running or ended engine: folder, names, permissions
and the number of files kept.
"""

import contextlib
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.flight.layout import (
    COPIED_OFFSET,
    FACTS_OFFSET,
    FACTS_SIZE_OFFSET,
    FIRST_OFFSET,
    GENERATION_OFFSET,
    HEADER_BYTES,
    LAUNCH,
    LAUNCH_OFFSET,
    MAX_FACTS_BYTES,
    RINGS,
    STEP,
    TOTALS,
    TOTALS_OFFSET,
    FlightError,
    FlightFacts,
    Geometry,
    decode_facts,
)
from penstock.server.observe.flight.memory import map_memory

_NUM_TRIES = 5
_NUM_RINGS = len(RINGS)
_MAX_COUNT = 1 << 62
MAX_NUM_FILES = 8
"""Maximum number of files kept per service and reason. The limit is per reason, so that frequent
dumps do not replace those of crashes."""
MAX_NUM_ALL_FILES = 64
_PREFIX, _SUFFIX, _PARTIAL = "penstock-flight-", ".bin", ".part"
_MAX_WHY_CHARS = 40
_MAX_PARTIAL_AGE_S = 60.0
"""Age in seconds after which an unchanged partial file is considered abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """A launched step, with its number of rows of each kind and of prefill tokens. `at_s` is the
    time of the launch in seconds on the monotonic clock."""

    step: int
    at_s: float
    num_decodes: int
    num_prefill_rows: int
    num_prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """The content of a recording when it was read: rows of `layout.STEP`, `EVENT` and `REQUEST`,
    the oldest first.

    `last_launch` is None before the first launch. A launched step that is not in `steps` is in
    flight. `copied_s` is the time of the copy on the monotonic clock, 0 if this was not read from a
    copy.
    """

    facts: FlightFacts
    totals: dict[str, int]
    steps: NDArray[Any]
    events: NDArray[Any]
    requests: NDArray[Any]
    last_launch: LaunchRecord | None
    copied_s: float


class FlightReader:
    """Reads the memory of a descriptor (int), a copy (bytes), or a file (Path). Not thread-safe.

    When a new engine reuses the memory, the next read returns the content of the new engine. The
    constructor raises OSError if the source cannot be read. The constructor and all methods that
    read raise FlightError for invalid content.
    """

    def __init__(self, source: int | bytes | Path) -> None:
        self._map: mmap.mmap | None = None
        if isinstance(source, int):
            self._map, geometry = map_memory(source)
            data: bytes | mmap.mmap = self._map
        else:
            data, geometry = _checked(source)
        view = memoryview(data)
        self._view = view
        self._sizes = geometry.num_rows
        self._generations = view[GENERATION_OFFSET:TOTALS_OFFSET].cast("Q")
        self._totals = view[TOTALS_OFFSET:FIRST_OFFSET].cast("Q")
        self._firsts = view[FIRST_OFFSET:COPIED_OFFSET].cast("Q")
        self._rings = [
            np.frombuffer(data, dtype=row, count=num, offset=geometry.offset(ring))
            for ring, (row, num) in enumerate(zip(RINGS, geometry.num_rows, strict=True))
        ]
        self._generation: int = 0
        self._facts: FlightFacts | None = None
        self._next_step = 0

    @property
    def facts(self) -> FlightFacts | None:
        """Metadata of the engine that was read last; None before the first engine has started."""
        if self._facts is None:
            self._follow()
        return self._facts

    @property
    def totals(self) -> dict[str, int]:
        """Counts since the start of the engine, by their names in `layout.TOTALS`."""
        return dict(zip(TOTALS, self._totals.tolist(), strict=True))

    def new_steps(self) -> tuple[NDArray[Any], int]:
        """Return the steps since the last call (a copy of STEP rows), and the number of earlier
        steps that were overwritten before they could be read.

        All steps are of one engine; after the call, `facts` describes this engine. There are no
        steps before the first engine, and while an engine initialises the memory.
        """
        if not self._follow():
            return np.zeros(0, dtype=STEP), 0
        rows, first, num = self._held(0, self._next_step)
        if self._generations[0] != self._generation:
            return np.zeros(0, dtype=STEP), 0
        num_missed = first - self._next_step
        self._next_step = num
        return rows, num_missed

    def recording(self) -> Recording:
        """Return the current content of the memory. All of it is from one engine.

        Raises FlightError if no engine has written yet, or one is initialising the memory.
        """
        for _ in range(_NUM_TRIES):
            if not self._follow():
                continue
            generation, facts = self._generation, self._facts
            totals = self.totals
            held = [self._held(ring, 0)[0] for ring in range(_NUM_RINGS)]
            launch = self._last_launch()
            (copied_s,) = struct.unpack_from("<d", self._view, COPIED_OFFSET)
            if facts is not None and self._generations[0] == generation:
                return Recording(
                    facts=facts,
                    totals=totals,
                    steps=held[0],
                    events=held[1],
                    requests=held[2],
                    last_launch=launch,
                    copied_s=copied_s,
                )
        raise FlightError("contains no engine's record, or one that has just started")

    def copy(self, now: float) -> bytes:
        """Return a copy of the memory in the file format. `now` is the time on the monotonic clock,
        in seconds. Rows that may have been overwritten during the copy are marked invalid.

        Raises FlightError if no engine has written yet, or one is initialising the memory.
        """
        for _ in range(_NUM_TRIES):
            if not self._follow():
                continue
            generation = self._generation
            totals = self._totals.tolist()
            data = bytearray(self._view)
            counts = self._totals[:_NUM_RINGS].tolist()
            if self._generations[0] != generation:
                continue
            firsts = [
                max(first, count - size + 1)
                for first, count, size in zip(
                    self._firsts.tolist(), counts, self._sizes, strict=True
                )
            ]
            struct.pack_into(f"<{len(totals)}Q", data, TOTALS_OFFSET, *totals)
            struct.pack_into(f"<{_NUM_RINGS}Q", data, FIRST_OFFSET, *(max(0, n) for n in firsts))
            struct.pack_into("<d", data, COPIED_OFFSET, now)
            return bytes(data)
        raise FlightError("contains no engine's record, or one that has just started")

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        self._rings = []
        for view in (self._generations, self._totals, self._firsts, self._view):
            view.release()
        if self._map is not None:
            self._map.close()

    def _follow(self) -> bool:
        """If a new engine has initialised the memory, read its facts and start at its first step.
        Returns False before the first engine, and while an engine initialises the memory."""
        generation: int = self._generations[0]
        if not generation or generation % 2:
            return False
        if generation != self._generation:
            facts = self._read_facts()
            if self._generations[0] != generation:
                return False
            self._generation, self._facts, self._next_step = generation, facts, 0
        return True

    def _read_facts(self) -> FlightFacts:
        (num_bytes,) = struct.unpack_from("<I", self._view, FACTS_SIZE_OFFSET)
        data = bytes(self._view[FACTS_OFFSET : FACTS_OFFSET + min(num_bytes, MAX_FACTS_BYTES)])
        try:
            return decode_facts(data)
        except ValueError as error:
            raise FlightError(f"has facts that cannot be read: {error}") from error

    def _held(self, ring: int, first: int) -> tuple[NDArray[Any], int, int]:
        """Return the rows of a ring that are available, from row number `first` on.

        Also returns the number of the first returned row, and the number of the row that follows
        the last one.
        """
        rows, size = self._rings[ring], self._sizes[ring]
        num = self._totals[ring]
        first = max(first, num - size + 1, self._firsts[ring])
        if max(first, num) > _MAX_COUNT:
            raise FlightError("has impossible counts")
        taken = rows[np.arange(first, num) & (size - 1)]
        # The oldest rows may have been overwritten meanwhile; one more may be partially
        # overwritten.
        oldest = min(max(first, self._totals[ring] - size + 1), num)
        return taken[oldest - first :], oldest, num

    def _last_launch(self) -> LaunchRecord | None:
        step, at_s, num_decodes, num_rows, num_tokens = LAUNCH.unpack_from(
            self._view, LAUNCH_OFFSET
        )
        if not at_s:
            return None
        return LaunchRecord(
            step=step,
            at_s=at_s,
            num_decodes=num_decodes,
            num_prefill_rows=num_rows,
            num_prefill_tokens=num_tokens,
        )


def _checked(source: bytes | Path) -> tuple[bytes, Geometry]:
    if isinstance(source, bytes):
        return source, Geometry.of_header(source[:HEADER_BYTES], len(source))
    with source.open("rb") as file:
        header = file.read(HEADER_BYTES)
        # Checked first, so that a large file of another format is not read.
        geometry = Geometry.of_header(header, os.fstat(file.fileno()).st_size)
        data = header + file.read(geometry.num_bytes - len(header))
    if len(data) != geometry.num_bytes:
        raise FlightError("became shorter while it was read")
    return data, geometry


def default_folder() -> Path:
    """Return the default folder of flight files: one per user in the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"penstock-flight-{os.geteuid()}"


def dump(memory: int, folder: Path | None, why: str, *, port: int | None = None) -> Path:
    """Write the memory of a descriptor to a new file in `folder` (None: `default_folder`).

    Only the owner may read the file; the write is atomic. The file name contains `port`, the port
    of the service, because services may share a folder, and the reason `why`. The newest
    `MAX_NUM_FILES` of each port and reason are kept, and `MAX_NUM_ALL_FILES` in total. Raises
    FlightError if no engine has written yet or one is initialising the memory, and OSError if the
    file cannot be written (PermissionError for a default folder of another user).
    """
    reader = FlightReader(memory)
    try:
        data = reader.copy(time.monotonic())
    finally:
        reader.close()
    folder = make_default_folder() if folder is None else folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _delete_partial(folder)
    path = folder / _name(port, why)
    _write(path, data)
    _delete_old(folder)
    return path


def make_default_folder() -> Path:
    """Return the default folder; create it with mode 0700 if it is missing, otherwise set that
    mode.

    Raises PermissionError if the path is a link or belongs to another user, because the temporary
    folder is world-writable.
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
    reason = re.sub(r"[^a-z0-9]+", "-", why.lower()).strip("-")[:_MAX_WHY_CHARS] or "requested"
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    port_prefix = "" if port is None else f"{port}-"
    return f"{_PREFIX}{at}-{port_prefix}{reason}{_SUFFIX}"


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


def _delete_old(folder: Path) -> None:
    # File names sort by time.
    files = sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}"))
    kinds: dict[str, list[Path]] = {}
    for path in files:
        _, _, kind = path.name.removeprefix(_PREFIX).partition("-")
        kinds.setdefault(kind, []).append(path)
    old = set(files[:-MAX_NUM_ALL_FILES])
    old.update(path for alike in kinds.values() for path in alike[:-MAX_NUM_FILES])
    for path in old:
        path.unlink(missing_ok=True)


def _delete_partial(folder: Path) -> None:
    """Remove partial files of processes that were killed while they wrote."""
    now_s = time.time()
    for path in folder.glob(f".{_PREFIX}*{_SUFFIX}{_PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):  # Another process has removed or completed it.
            if now_s - path.stat().st_mtime > _MAX_PARTIAL_AGE_S:
                path.unlink()
