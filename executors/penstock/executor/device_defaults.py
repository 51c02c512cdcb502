"""How many requests run at once and how many tokens a step takes, where nobody says.

Owns the numbers by device: a GPU reads its weights once for all rows of a step, so it wants many.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """`max_num_seqs` requests, `max_num_batched_tokens` tokens a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


_ON_CPU = DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=2048)
# A chunk that fills the step is what the others wait for: twice the tokens bring less than 1 % more
# throughput and twice the longest gap between tokens.
_ON_CUDA = DeviceDefaults(max_num_seqs=256, max_num_batched_tokens=4096)


def device_defaults(device: str) -> DeviceDefaults:
    """What fits `device`, as in `ExecutorConfig.device`."""
    return _ON_CUDA if device.startswith("cuda") else _ON_CPU
