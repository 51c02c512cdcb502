"""The number of cores that this process may use: those in its affinity mask, or fewer under a
quota.

Owns the reading of the affinity mask (taskset, cpusets) and of the CPU quota of control groups,
which `docker run --cpus` and Kubernetes limits set without narrowing the mask.
"""

import os
from pathlib import Path

from penstock.executor.control_groups import GROUPS, MOUNT, ControlGroup, control_groups


def num_usable_cores(groups: Path = GROUPS, mount: Path = MOUNT) -> int:
    """Return the number of usable cores: at least one, fractions rounded down. `groups` and
    `mount`: see `control_groups`.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for group in control_groups("cpu", groups, mount) for quota in _quota(group)]
    return max(1, min([cores, *map(int, quotas)]))


def _quota(group: ControlGroup) -> list[float]:
    """Return the CPU quota in cores; empty without a quota."""
    if group.is_first_version:
        numbers = [group.read(f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    else:
        numbers = group.read("cpu.max").split()
    quota, period = [number.strip() for number in (*numbers, "", "")][:2]
    # No limit is "max", or -1 in the first version.
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        return [int(quota) / int(period)]
    return []
