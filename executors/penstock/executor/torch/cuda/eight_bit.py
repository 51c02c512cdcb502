"""8-bit weights and pages of the fused step on a GPU: checks whether the settings are supported,
and measures the scales of pages, two (keys, values) for each KV head of a layer.

e4m3 is a floating-point format: its relative rounding is the same for all numbers within a factor
of 2**14 below its maximum, so a scale only has to match the magnitude of a head's values, and a
short sequence suffices to measure it. Without scales, keys with large biases exceed 448, the
maximum, and small values fall below 2**-6, the smallest normal number.
"""

import torch
from torch import Tensor, nn

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.kv_pages import KVPages

_HAS_E4M3 = (8, 9)
_GREATEST = 448.0
_HEADROOM = 8.0
"""Factor by which later elements may exceed the maximum of the short sequence without clipping."""


def check_eight_bit(
    config: ExecutorConfig,
    *,
    dtype: torch.dtype,
    capability: tuple[int, int],
    linears: tuple[nn.Linear, ...],
) -> None:
    """Raise UnsupportedModel naming a setting for which there are no kernels.

    `dtype`: the model's number format. `capability`: the GPU's compute capability. `linears`: the
    linear modules of one layer of the model.
    """
    if config.kv_cache_dtype == "int8":
        raise UnsupportedModel("kv_cache_dtype int8 is for a CPU; a CUDA device supports fp8")
    for name in ("quantization", "kv_cache_dtype"):
        if getattr(config, name) == "fp8" and capability < _HAS_E4M3:
            instead = ": set int8" if name == "quantization" else ""
            raise UnsupportedModel(
                f"{name} fp8 needs a GPU of compute capability 8.9 or later{instead}"
            )
    if config.quantization != "fp8":
        return
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(f"quantization fp8 needs dtype bfloat16, not {name}")
    if any(linear.in_features % 16 or linear.out_features % 16 for linear in linears):
        raise UnsupportedModel("quantization fp8 needs widths of multiples of 16: set int8")


def measure_scales(pages: KVPages) -> tuple[Tensor, ...]:
    """Return the scales of keys and values, float32 [2, heads] per layer. `pages` must contain one
    sequence, and zeros elsewhere.
    """
    return tuple(_scales(pages.layer(index)) for index in range(len(pages.shapes)))


def _scales(layer: Tensor) -> Tensor:
    greatest = layer.abs().amax((0, 3, 4)).float()
    return torch.where(greatest > 0, greatest * (_HEADROOM / _GREATEST), 1.0)
