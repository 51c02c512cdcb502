"""The cache of built engines: one folder per key, complete or not used at all.

Owns the lock, the temporary folder of a build, and the manifest: the sizes of all files and the
content hashes of small ones, so that damage is found without reading the weights. An engine is
built next to its final folder and renamed, so a killed build leaves no engine there; the next build
removes its temporary folder. Does not know how engines are built.
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
    """The cache folder cannot be used; the message gives the reason."""


class CacheBusy(Exception):
    """Another build held the lock for too long; the message names it."""


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A held lock. The builder inherits `descriptor`."""

    descriptor: int

    def write_holder(self, holder: str) -> None:
        """Write the name of the lock's holder, for the processes that wait."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, holder.encode()[:_MAX_HOLDER_BYTES], 0)


class EngineCache:
    """A folder of engines. Any number of processes may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        """`folder` is created when needed. The file system must support locks and renames."""
        self._folder = folder

    def place_of(self, model: Path, key: EngineKey) -> Path:
        """Return the folder of the engine with this key."""
        return self._folder / f"{_ODD.sub('-', model.name) or 'model'}-{key.digest}"

    def exists(self, place: Path) -> bool:
        """Return whether our build exists. Raises CacheUnusable for a folder of other origin."""
        if not place.exists():
            return False
        if not (place / MANIFEST).is_file():
            raise CacheUnusable(f"{place} is there, but no build of ours made it: move it away")
        return True

    def damage(self, place: Path) -> str:
        """Describe the damage of the stored engine in one line; "" if it is intact."""
        made = recognise(place)
        if not made.is_engine:
            return made.explanation
        try:
            manifest: Any = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            recorded = manifest["engine"]
            return first_difference(place, recorded)
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"{MANIFEST} cannot be used: {type(error).__name__}"

    @contextlib.contextmanager
    def locked(
        self, place: Path, on_wait: Callable[[float, str], None], *, max_wait_s: float | None = None
    ) -> Generator[BuildLock, None, None]:
        """Lock the place against other builds.

        The lock lives as long as any process holds the descriptor: a builder that outlives this
        process keeps it. `on_wait` gets the seconds waited so far and the holder, at intervals.
        Raises CacheBusy after `max_wait_s`; None waits without limit.
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
        """Create an empty folder next to the final one, for the holder of the lock; remove it after
        the block.
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

    def keep(self, built: Path, place: Path, manifest: Mapping[str, Any]) -> None:
        """Move a complete engine to its final folder in one step; replace a damaged one."""
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
    """Return the default folder, by the XDG base directories."""
    cache = environment.get("XDG_CACHE_HOME", "")
    root = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return root / "penstock" / "engines"


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Describe every file by its relative name, as JSON values. Raises OSError."""
    return {
        path.relative_to(folder).as_posix(): _described(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def first_difference(folder: Path, recorded: dict[str, dict[str, Any]]) -> str:
    """Return the first file that differs from its record, and why; "" if none does. Additional
    files are ignored.

    Raises OSError for a file that cannot be read.
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
