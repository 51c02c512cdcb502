"""Scales of keys and values in 8-bit pages, one for each KV head of a layer.

e4m3 is a floating-point format: its relative rounding is the same for all numbers within a factor
of 2**14 below its maximum, so a scale only has to match a head's magnitude, which a short sequence
shows. Without scales, biases of keys exceed 448 and small values fall below 2**-6.
"""

import torch
from torch import Tensor

from penstock.executor.torch.kv_pages import KVPages

_GREATEST = 448.0
_HEADROOM = 8.0
"""How far another element may exceed the greatest one of the short sequence without clipping."""


def measure_scales(pages: KVPages) -> tuple[Tensor, ...]:
    """Return float32 [2, heads] per layer. `pages`: one sequence, zero elsewhere."""
    return tuple(_scales(pages.layer(index)) for index in range(len(pages.shapes)))


def _scales(layer: Tensor) -> Tensor:
    greatest = layer.abs().amax((0, 3, 4)).float()
    return torch.where(greatest > 0, greatest * (_HEADROOM / _GREATEST), 1.0)
