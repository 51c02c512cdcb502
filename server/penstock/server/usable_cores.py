"""How many cores this process may use: those it may run on, or fewer where a quota limits its time.

Owns the reading of the affinity mask (taskset, cpusets) and of the CPU quota of control groups of
either version, which `docker run --cpus` and limits of Kubernetes set without narrowing the mask.
"""

import os
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def num_usable_cores(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """At least one; a fraction of a core counts as none. `groups` and `mount`: the files of
    this process's control groups and of their limits.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(groups, mount))]))


def _quotas(groups: Path, mount: Path) -> list[float]:
    """In cores, of the process's group and those around it."""
    found: list[float] = []
    for line in (_read(groups) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        # In a container the path may be that of the host, of which only the root is mounted.
        for parent in (part := PurePosixPath(path.lstrip("/")), *part.parents):
            found += _quota(root / parent, is_first_version=bool(controllers))
    return found


def _quota(folder: Path, *, is_first_version: bool) -> list[float]:
    if is_first_version:
        numbers = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    else:
        numbers = (_read(folder / "cpu.max") or "").split()
    quota, period = [number.strip() for number in (*numbers, "", "")][:2]
    # No limit is "max", or -1 in the first version.
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        return [int(quota) / int(period)]
    return []


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return None
