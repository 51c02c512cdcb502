"""Determines the number of CPU cores that this process may use.

The number is limited by the affinity mask (taskset, cpusets) and by the CPU quota of the control
group. `docker run --cpus` and Kubernetes limits set this quota without changing the mask.
"""

import os
from pathlib import Path

from penstock.executor.control_groups import GROUPS, MOUNT, ControlGroup, control_groups


def num_usable_cores(groups: Path = GROUPS, mount: Path = MOUNT) -> int:
    """Return the number of usable cores, rounded down, at least 1.

    See `control_groups` for `groups` and `mount`.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for group in control_groups("cpu", groups, mount) for quota in _quota(group)]
    return max(1, min([cores, *map(int, quotas)]))


def _quota(group: ControlGroup) -> list[float]:
    """Return the CPU quota of a control group in cores, as a list with one item; empty if there is
    no quota."""
    if group.is_first_version:
        numbers = [group.read(f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    else:
        numbers = group.read("cpu.max").split()
    quota, period = [number.strip() for number in (*numbers, "", "")][:2]
    # Without a limit the value is "max" in cgroup v2 and -1 in cgroup v1.
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        return [int(quota) / int(period)]
    return []
