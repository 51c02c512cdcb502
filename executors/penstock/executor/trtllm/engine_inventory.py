"""The files of a built engine, to detect damage before it is served.

Owns the list and the comparison: sizes of all files, the content of small ones. An engine's config
is read completely, its tens of gibibytes of weights are not.
"""

import hashlib
from pathlib import Path
from typing import Any

_SMALL_BYTES = 1 << 20


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file by its relative name, as JSON values. Raises OSError."""
    return {
        path.relative_to(folder).as_posix(): _described(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def first_difference(folder: Path, recorded: dict[str, dict[str, Any]]) -> str:
    """The first file that is not as recorded, and why; "" if all are. Additional files are ignored.

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
