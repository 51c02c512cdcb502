"""The cache of built engines: one folder per engine key. A damaged or incomplete engine is not
used.

Manages the lock, the temporary folder of a build, and the manifest. The manifest contains the sizes
of all files and the hashes of files up to 1 MiB, so that most damage is found without reading the
weights. An engine is built in a temporary folder and then renamed, so a killed build leaves no
partial engine; the next build of the same engine removes the temporary folder.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.executor.trtllm.engine_key import EngineKey
from penstock.executor.trtllm.model_kind import recognise

_SMALL_BYTES = 1 << 20
MANIFEST = "penstock-build.json"
_LOCK_POLL_S = 0.5
_MAX_HOLDER_BYTES = 200
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


class CacheUnusable(Exception):
    """The path for an engine is taken by a folder that this cache did not create; the message names
    the folder.
    """


class CacheBusy(Exception):
    """Another build held the lock for too long; the message names its process, if it is known."""


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A held lock on the build of an engine. `descriptor`: file descriptor of the lock file; the
    builder process inherits it, so the lock is held until both processes have closed it.
    """

    descriptor: int

    def write_holder(self, holder: str) -> None:
        """Write a description of the lock's holder to the lock file, for processes that wait; at
        most 200 bytes.
        """
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, holder.encode()[:_MAX_HOLDER_BYTES], 0)


class EngineCache:
    """A folder of engines. Any number of processes may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        """`folder` is created when an engine is built. Its file system must support `flock` and
        renames.
        """
        self._folder = folder

    def path_of(self, model: Path, key: EngineKey) -> Path:
        """Return the path of the folder for the engine with this key, whether or not it exists."""
        return self._folder / f"{_ODD.sub('-', model.name) or 'model'}-{key.digest}"

    def exists(self, place: Path) -> bool:
        """Return whether the cache has an engine at `place`. Raises CacheUnusable if this cache did
        not create the folder.
        """
        if not place.exists():
            return False
        if not (place / MANIFEST).is_file():
            raise CacheUnusable(f"{place} exists, but this cache did not create it: move it away")
        return True

    def damage(self, place: Path) -> str:
        """Describe in one line what is wrong with the engine at `place`; "" if it is intact."""
        made = recognise(place)
        if not made.is_engine:
            return made.explanation
        try:
            manifest: Any = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            recorded = manifest["engine"]
            return first_difference(place, recorded)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return f"{MANIFEST} cannot be used: {type(error).__name__}"

    @contextlib.contextmanager
    def locked(
        self, place: Path, on_wait: Callable[[float, str], None], *, max_wait_s: float | None = None
    ) -> Generator[BuildLock, None, None]:
        """Hold the lock for building the engine at `place` during the `with` block.

        The lock is held while any process has the descriptor open, so a builder that outlives this
        process still holds it. Every 0.5 s while waiting, `on_wait` gets the seconds waited so far
        and the holder ("" if unknown). Raises CacheBusy after `max_wait_s`; None: no limit.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / f".{place.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        started_s = time.monotonic()
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited_s = time.monotonic() - started_s
                    holder = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode("utf-8", "replace")
                    if max_wait_s is not None and waited_s >= max_wait_s:
                        raise CacheBusy(
                            f"another build of this engine still runs after {waited_s:.0f} s"
                            f" ({holder or 'process unknown'})"
                        ) from None
                    on_wait(waited_s, holder)
                    time.sleep(_LOCK_POLL_S)
            lock = BuildLock(descriptor)
            lock.write_holder(f"process {os.getpid()}")
            yield lock
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def building(self, place: Path) -> Generator[Path, None, None]:
        """Remove the build folders that killed builds of this engine left, then yield a new empty
        one next to `place`. The caller must hold the lock.

        The folder is removed at the end of the `with` block, unless `store` has renamed it.
        """
        prefix = f".{place.name}.building-"
        for left in self._folder.glob(f"{prefix}*"):
            # The folder is from a killed build: no other process holds the lock.
            shutil.rmtree(left)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def store(self, built: Path, place: Path, manifest: Mapping[str, Any]) -> None:
        """Add the sizes and hashes of the files to `manifest`, write it to the build folder
        `built`, and rename that folder to `place`, replacing an existing folder.
        """
        # mkdtemp makes the folder private; a service may run as another user.
        built.chmod(0o755)
        whole = {**manifest, "engine": inventory(built)}
        with (built / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(whole, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            # A service that has its files open keeps them.
            aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.building-", dir=self._folder))
            place.rename(aside)
            built.rename(place)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            built.rename(place)


def default_cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the default cache folder: `penstock/engines` in XDG_CACHE_HOME if that is an absolute
    path, else in ~/.cache.
    """
    cache = environment.get("XDG_CACHE_HOME", "")
    root = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return root / "penstock" / "engines"


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Return a JSON-compatible dict that maps the relative path of every file in `folder` to its
    size in bytes and, for files of at most 1 MiB, its SHA-256.

    Raises OSError if a file cannot be read.
    """
    return {
        path.relative_to(folder).as_posix(): _described(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def first_difference(folder: Path, recorded: dict[str, dict[str, Any]]) -> str:
    """Describe the first file that differs from its record in `recorded` (as from `inventory`); ""
    if none differs. An empty `recorded` counts as a difference; files without a record are ignored.

    Raises OSError if a file cannot be read; AttributeError, LookupError or TypeError if the record
    is malformed.
    """
    for name, was in recorded.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != was["size_bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {was['size_bytes']}"
        if _described(path) != was:
            return f"{name} was changed"
    return "" if recorded else "no files were recorded"


def _described(path: Path) -> dict[str, Any]:
    size_bytes = path.stat().st_size
    if size_bytes > _SMALL_BYTES:
        return {"size_bytes": size_bytes}
    return {"size_bytes": size_bytes, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
