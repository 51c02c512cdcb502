"""Default batch sizes and token budgets by device.

A step reads the weights once for all its rows, and a GPU needs more rows than a CPU for its full
throughput.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """Default `max_num_seqs` and `max_num_batched_tokens` of a device."""

    max_num_seqs: int
    max_num_batched_tokens: int


_ON_CPU = DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=2048)
# Other requests wait while a prefill chunk fills the step. Twice as many tokens gain less than 1 %
# of throughput and double the longest inter-token gap.
_ON_CUDA = DeviceDefaults(max_num_seqs=256, max_num_batched_tokens=3584)


def device_defaults(device: str) -> DeviceDefaults:
    """Return the defaults for `device` (format: see `ExecutorConfig.device`)."""
    return _ON_CUDA if device.startswith("cuda") else _ON_CPU
