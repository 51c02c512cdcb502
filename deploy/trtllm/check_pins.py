"""Keeps the packages of an image unchanged: records versions, writes constraints, compares.

    check_pins.py record                     print name==version of every installed package
    check_pins.py constraints before.txt     print a file for `pip install --constraint`
    check_pins.py compare FOLDER             compare before.txt with after.txt, and the lines of
                                             `pip check` in problems-before.txt with those in
                                             problems-after.txt; exit 1 if a package was removed,
                                             replaced or downgraded, or a line is new

The environment variable MAY_RISE names further packages, separated by spaces, that an install may
upgrade. Runs inside the image, before and after the install, with the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

# The only packages that an install may upgrade; it may not downgrade or remove them. The generated
# code does not load with an older grpcio, and no package of the image pins grpcio.
MAY_RISE = frozenset(
    {
        "googleapis-common-protos",
        "grpcio",
        "grpcio-channelz",
        "grpcio-health-checking",
        "grpcio-reflection",
        "grpcio-status",
    }
)
# A version that pip accepts in a constraint (PEP 440). Packages of a Linux distribution may have
# other versions: those are not written as constraints, but they are compared.
_VERSION = re.compile(
    r"([1-9][0-9]*!)?(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*((a|b|rc)(0|[1-9][0-9]*))?"
    r"(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?(\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?",
    re.IGNORECASE,
)


def normal_name(name: str) -> str:
    """Return a package's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return the versions of the installed packages by name.

    If a package is installed twice, the version of the copy that this interpreter imports counts.
    """
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # A folder left behind by an uninstall has neither.
        name: str | None = distribution.metadata["Name"]
        version: str | None = distribution.metadata["Version"]
        if name and version:
            versions.setdefault(normal_name(name), version)
    return versions


def written(versions: Mapping[str, str]) -> list[str]:
    """Return one line `name==version` for each package, sorted."""
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def parsed(lines: Iterable[str]) -> dict[str, str]:
    """Return the versions by name from the lines that `written` returned. Raises ValueError for any
    other line.
    """
    versions: dict[str, str] = {}
    for line in (stripped for line in lines if (stripped := line.strip())):
        name, separator, version = line.partition("==")
        if not separator or not name or not version:
            raise ValueError(f"not name==version: {line!r}")
        versions[normal_name(name)] = version
    return versions


def constraints(
    versions: Mapping[str, str], may_rise: Collection[str] = MAY_RISE
) -> dict[str, str]:
    """Return the versions that an install must keep and that pip accepts as constraints."""
    return {
        name: version
        for name, version in versions.items()
        if name not in may_rise and _VERSION.fullmatch(version)
    }


def changes(
    before: Mapping[str, str], after: Mapping[str, str], may_rise: Collection[str] = MAY_RISE
) -> list[str]:
    """Return one line for each package that an install removed, replaced or downgraded.

    Packages in `may_rise` may be upgraded.
    """
    found: list[str] = []
    for name, version in sorted(before.items()):
        now = after.get(name)
        if now is None:
            found.append(f"{name} {version} is gone")
        elif now == version:
            continue
        elif name not in may_rise:
            found.append(f"{name} {version} became {now}")
        elif _release(now) < _release(version):
            found.append(f"{name} {version} sank to {now}")
    return found


def new_problems(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Return the lines of `pip check` that are only in `after`."""
    known = {line.strip() for line in before}
    return sorted(
        line
        for line in {line.strip() for line in after} - known
        if line and line != "No broken requirements found."
    )


def compare(folder: Path, may_rise: Collection[str] = MAY_RISE) -> list[str]:
    """Compare the records in `folder` from before and after the install; return the lines of
    `changes`, then the lines of `new_problems`.
    """
    before, after = (parsed(_lines(folder / name)) for name in ("before.txt", "after.txt"))
    worse = changes(before, after, may_rise)
    worse += new_problems(
        _lines(folder / "problems-before.txt"), _lines(folder / "problems-after.txt")
    )
    return worse


def _release(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def main(arguments: list[str]) -> int:
    """Run one command; return the exit code: 1 if `compare` found a difference, 2 for invalid
    arguments.
    """
    may_rise = MAY_RISE | {normal_name(name) for name in os.environ.get("MAY_RISE", "").split()}
    match arguments:
        case ["record"]:
            print("\n".join(written(installed())))
            return 0
        case ["constraints", record]:
            print("\n".join(written(constraints(parsed(_lines(Path(record))), may_rise))))
            return 0
        case ["compare", folder]:
            worse = compare(Path(folder), may_rise)
            for line in worse:
                print(f"the install changed what the image brings: {line}", file=sys.stderr)
            return 1 if worse else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
