"""The memory that this process may still take: what the machine has available, or less where a
control group limits it, which `docker run --memory` and limits of Kubernetes set.

The page cache counts as available: the kernel drops it for processes that need memory.
"""

import re
from pathlib import Path

from penstock.executor.control_groups import (
    GROUPS,
    MOUNT,
    ControlGroup,
    control_groups,
    read_text,
)

_MACHINE = Path("/proc/meminfo")


def available_bytes(
    machine: Path = _MACHINE, groups: Path = GROUPS, mount: Path = MOUNT
) -> int | None:
    """Bytes that may still be allocated; None where the system does not report it. `machine`:
    /proc/meminfo; `groups` and `mount`: see `control_groups`.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(machine), re.MULTILINE)
    rooms = [] if found is None else [int(found[1]) * 1024]
    for group in control_groups("memory", groups, mount):
        rooms += _room(group)
    return min(rooms, default=None)


def _room(group: ControlGroup) -> list[int]:
    """Memory left below the group's limit; empty without one."""
    names = ("limit_in_bytes", "usage_in_bytes") if group.is_first_version else ("max", "current")
    limit, used = (group.read(f"memory.{name}").strip() for name in names)
    if not (limit.isdecimal() and used.isdecimal()):
        return []
    total = "total_" if group.is_first_version else ""
    cached = re.findall(
        rf"^{total}(?:in)?active_file (\d+)$", group.read("memory.stat"), re.MULTILINE
    )
    return [max(int(limit) - int(used) + sum(map(int, cached)), 0)]
