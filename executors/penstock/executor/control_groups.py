"""The limits of the control groups that this process is in, of either version.

Owns the location of their files; readers interpret the content.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """The files of a group in `folder`; versions differ in their names."""

    folder: Path
    is_first_version: bool

    def read(self, name: str) -> str:
        """The text of a file, empty without one."""
        return read_text(self.folder / name)


def control_groups(
    controller: str, groups: Path = GROUPS, mount: Path = MOUNT
) -> Iterator[ControlGroup]:
    """The process's group and those around it, for a controller such as `cpu`.

    `groups` and `mount`: the file with the process's groups, and where their limits are.
    """
    for line in read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        # In a container the path may be that of the host, of which only the root is mounted.
        for parent in (part := PurePosixPath(path.lstrip("/")), *part.parents):
            yield ControlGroup(root / parent, is_first_version=bool(controllers))


def read_text(file: Path) -> str:
    """The text of a file of the kernel, empty without one."""
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
