"""Reads the limits of this process's control groups (cgroup v1 and v2).

Locates and reads the files; callers interpret their content.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """A control group's folder; the names of its files depend on the cgroup version."""

    folder: Path
    is_first_version: bool

    def read(self, name: str) -> str:
        """Return the text of a file, or an empty string if it cannot be read."""
        return read_text(self.folder / name)


def control_groups(
    controller: str, groups: Path = GROUPS, mount: Path = MOUNT
) -> Iterator[ControlGroup]:
    """Yield the process's group and its ancestors, for a controller such as `cpu`.

    `groups`: the file that lists the process's groups. `mount`: the root of the control group file
    systems.
    """
    for line in read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        # In a container the path may be that of the host, but only the group itself is mounted.
        for parent in (part := PurePosixPath(path.lstrip("/")), *part.parents):
            yield ControlGroup(root / parent, is_first_version=bool(controllers))


def read_text(file: Path) -> str:
    """Return the text of a kernel file, or an empty string if it cannot be read."""
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
