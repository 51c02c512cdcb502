"""Checks which 8-bit settings the fused step on a GPU supports, by model and device."""

import torch
from torch import nn

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.errors import UnsupportedModel

_HAS_E4M3 = (8, 9)


def check_eight_bit(
    config: ExecutorConfig,
    *,
    dtype: torch.dtype,
    capability: tuple[int, int],
    linears: tuple[nn.Linear, ...],
) -> None:
    """Raise UnsupportedModel naming a setting for which there are no kernels.

    `dtype`: of the model. `capability`: the GPU's compute capability. `linears`: of a layer.
    """
    if config.kv_cache_dtype == "int8":
        raise UnsupportedModel("kv_cache_dtype int8 is for a CPU; a CUDA device takes fp8")
    for name in ("quantization", "kv_cache_dtype"):
        if getattr(config, name) == "fp8" and capability < _HAS_E4M3:
            instead = ": set int8" if name == "quantization" else ""
            raise UnsupportedModel(
                f"{name} fp8 needs a GPU of compute capability 8.9 or later{instead}"
            )
    if config.quantization != "fp8":
        return
    if dtype != torch.bfloat16:
        raise UnsupportedModel("quantization fp8 needs dtype bfloat16, whose range products need")
    if any(linear.in_features % 16 or linear.out_features % 16 for linear in linears):
        raise UnsupportedModel("quantization fp8 needs widths of multiples of 16: set int8")
