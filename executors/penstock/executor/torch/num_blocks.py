"""Determines the number of KV cache blocks, from the settings or from a GPU's free memory.

`num_host_blocks` and `num_device_blocks` raise ValueError if the blocks do not fit into the free
memory. On a host this is MemAvailable, or less if a control group limits it. The page cache counts
as available, since the kernel evicts it on demand.
"""

import logging
import re
from pathlib import Path

from penstock.executor.config import ExecutorConfig
from penstock.executor.control_groups import (
    GROUPS,
    MOUNT,
    ControlGroup,
    control_groups,
    read_text,
)
from penstock.executor.torch.health_probe import NUM_PROBE_BLOCKS

_MACHINE = Path("/proc/meminfo")
_GIB = 1 << 30
_MIB = 1 << 20
_MARGIN_BYTES = _GIB
"""Device memory left free for allocations that are not known before the pages exist: the driver's
copies of captured graphs, kernels that are loaded with them or later, and fragmentation; on the
fused path also log probabilities of prompts.
"""
logger = logging.getLogger(__name__)


def num_host_blocks(config: ExecutorConfig, *, bytes_each: int, max_seq_len: int) -> int:
    """Return the setting `num_blocks`. If it is not set, return the number of blocks of
    `bytes_each` bytes that fit into the configured cache size, but at most the number that
    `max_num_seqs` sequences of full length need.

    Raises ValueError naming the setting if the size is less than a block or the machine does not
    have enough memory.
    """
    if config.num_blocks is not None:
        name, num_blocks = "num_blocks", config.num_blocks
    else:
        name, num_blocks = "kv_cache_mib", config.host_cache_bytes // bytes_each
        if num_blocks < 1:
            given = f"{config.host_cache_bytes / _MIB:g}"
            raise ValueError(
                f"kv_cache_mib must hold a block of {bytes_each} bytes, not {given} MiB"
            )
        num_blocks = _usable_blocks(
            config, num_blocks, bytes_each=bytes_each, max_seq_len=max_seq_len
        )
    available = available_bytes()
    if available is not None and num_blocks * bytes_each > available:
        raise ValueError(
            f"{name} asks for {num_blocks * bytes_each / _GIB:.1f} GiB of pages;"
            f" {available / _GIB:.1f} GiB of memory are available next to the weights"
        )
    return num_blocks


def num_device_blocks(
    config: ExecutorConfig,
    *,
    bytes_each: int,
    max_seq_len: int,
    free_bytes: int,
    step_bytes: int,
) -> int:
    """Return the number of blocks for a device with `free_bytes` left after the weights.

    This is the setting `num_blocks`. If it is not set, it is the number of blocks of `bytes_each`
    bytes that fit into `kv_cache_bytes` or, if that is not set either, into the share
    `kv_memory_fraction` of the usable memory, but at most the number that `max_num_seqs` sequences
    of full length need.

    The usable memory is `free_bytes` minus `step_bytes` (memory that the largest step needs), the
    health probe's blocks and a margin. Raises ValueError naming the setting when the blocks do not
    fit into it, or when not even one block fits.
    """
    reserved_bytes = step_bytes + NUM_PROBE_BLOCKS * bytes_each + _MARGIN_BYTES
    usable_bytes = max(free_bytes - reserved_bytes, 0)
    where = (
        f"are free on {config.device} next to the weights and {reserved_bytes / _GIB:.1f} GiB"
        " reserved for steps"
    )
    name = size_setting(config)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // bytes_each
    else:
        num_blocks = int(usable_bytes * config.kv_memory_fraction) // bytes_each
    if config.num_blocks is None:
        num_blocks = _usable_blocks(
            config, num_blocks, bytes_each=bytes_each, max_seq_len=max_seq_len
        )
    if num_blocks < 1:
        raise ValueError(
            f"{name} leaves no room for a block of {bytes_each} bytes:"
            f" {usable_bytes / _GIB:.1f} GiB {where}"
        )
    if num_blocks * bytes_each > usable_bytes:
        raise ValueError(
            f"{name} asks for {num_blocks * bytes_each / _GIB:.1f} GiB of pages;"
            f" {usable_bytes / _GIB:.1f} GiB {where}"
        )
    return num_blocks


def size_setting(config: ExecutorConfig) -> str:
    """Return the name of the setting that determines how much of a device's memory the pages
    take.
    """
    if config.num_blocks is not None:
        return "num_blocks"
    return "kv_memory_fraction" if config.kv_cache_bytes is None else "kv_cache_mib"


def _usable_blocks(
    config: ExecutorConfig, num_blocks: int, *, bytes_each: int, max_seq_len: int
) -> int:
    """Return `num_blocks`, or the number that `max_num_seqs` sequences of full length need if it is
    lower; log a warning if this reduces a configured size.
    """
    most = config.max_num_seqs * -(-max_seq_len // config.block_size)
    if num_blocks <= most:
        return num_blocks
    if config.kv_cache_bytes is not None:
        logger.warning(
            "--kv-cache-mib is %d; %d are used: %d sequences of %d tokens do not need more",
            config.kv_cache_bytes // _MIB,
            most * bytes_each // _MIB,
            config.max_num_seqs,
            max_seq_len,
        )
    return most


def available_bytes(
    machine: Path = _MACHINE, groups: Path = GROUPS, mount: Path = MOUNT
) -> int | None:
    """Return the bytes of memory that can be allocated; None if the system does not report them.

    `machine`: /proc/meminfo. `groups`, `mount`: see `control_groups`.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(machine), re.MULTILINE)
    free = [] if found is None else [int(found[1]) * 1024]
    for group in control_groups("memory", groups, mount):
        free += _group_free_bytes(group)
    return min(free, default=None)


def _group_free_bytes(group: ControlGroup) -> list[int]:
    """Return the number of bytes that are free within the group's limit, in a list of length one;
    an empty list if there is no limit.
    """
    names = ("limit_in_bytes", "usage_in_bytes") if group.is_first_version else ("max", "current")
    limit, used = (group.read(f"memory.{name}").strip() for name in names)
    if not (limit.isdecimal() and used.isdecimal()):
        return []
    total = "total_" if group.is_first_version else ""
    cached = re.findall(
        rf"^{total}(?:in)?active_file (\d+)$", group.read("memory.stat"), re.MULTILINE
    )
    return [max(int(limit) - int(used) + sum(map(int, cached)), 0)]
