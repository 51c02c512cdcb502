"""Default batch sizes and token budgets by device.

A GPU reads its weights once for all rows of a step, so it needs many.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """Default `max_num_seqs` and `max_num_batched_tokens` of a device."""

    max_num_seqs: int
    max_num_batched_tokens: int


_ON_CPU = DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=2048)
# Other requests wait while a chunk fills the step: twice as many tokens gain less than 1 % of
# throughput and double the longest gap between tokens.
_ON_CUDA = DeviceDefaults(max_num_seqs=256, max_num_batched_tokens=3584)


def device_defaults(device: str) -> DeviceDefaults:
    """Return the defaults for `device`, which is given as in `ExecutorConfig.device`."""
    return _ON_CUDA if device.startswith("cuda") else _ON_CPU
