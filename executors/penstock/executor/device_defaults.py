"""Default batch sizes and token budgets by device.

A step reads the weights once for all its rows, and a GPU needs more rows than a CPU for its full
throughput.
"""

from dataclasses import dataclass

from penstock.scheduler.config import GPU_STEP_TOKENS, STEP_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """Default `max_num_seqs` and `max_num_batched_tokens` of a device."""

    max_num_seqs: int
    max_num_batched_tokens: int


ON_CPU = DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=STEP_TOKENS)
ON_CUDA = DeviceDefaults(max_num_seqs=256, max_num_batched_tokens=GPU_STEP_TOKENS)


def device_defaults(device: str) -> DeviceDefaults:
    """Return the defaults for `device` (format: see `ExecutorConfig.device`)."""
    return ON_CUDA if device.startswith("cuda") else ON_CPU
