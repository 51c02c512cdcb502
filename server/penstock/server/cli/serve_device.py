"""What the device decides of `penstock serve`: slots and token budget where nobody says.

Owns the defaults' way into the settings, and the flags that mean nothing on a device.
"""

from collections.abc import Mapping
from typing import Any

from penstock.executor.device_defaults import device_defaults


def with_device_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what a GPU wants. Raises ValueError naming a flag that means nothing."""
    device = settings["device"] or "cpu"
    if settings["executor"] != "torch" or not device.startswith("cuda"):
        if settings["kv_memory_fraction"] is not None and settings["executor"] != "trtllm":
            raise ValueError("kv-memory-fraction means nothing without a GPU: set kv-cache-mib")
        return dict(settings)
    usual = device_defaults(device)
    budget, num_seqs = settings["max_num_batched_tokens"], settings["max_num_seqs"]
    if num_seqs is None:
        num_seqs = usual.max_num_seqs if budget is None else min(usual.max_num_seqs, budget)
    if budget is None:
        budget = max(usual.max_num_batched_tokens, num_seqs)
    return {**settings, "max_num_seqs": num_seqs, "max_num_batched_tokens": budget}
