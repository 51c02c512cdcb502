"""Computes cosines and sines of positions, from the frequencies of the model's rotary module."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RotaryTable:
    """Tables of cosines and sines, each float32 [positions, head_dim / 2]."""

    cosines: Tensor
    sines: Tensor


@torch.inference_mode()
def rotary_of(positions: Tensor, inverse_frequencies: Tensor, scaling: float) -> RotaryTable:
    """Return the cosines and sines of `positions` [n], multiplied by `scaling`, for
    `inverse_frequencies` [head_dim / 2]; as in transformers, but not rounded to half precision.
    """
    frequencies = inverse_frequencies.to(device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), frequencies)
    return RotaryTable(
        cosines=(angles.cos() * scaling).contiguous(), sines=(angles.sin() * scaling).contiguous()
    )


def make_rotary_table(
    inverse_frequencies: Tensor, scaling: float, *, num_positions: int, device: torch.device
) -> RotaryTable:
    """Return the table of all positions below `num_positions`."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    return rotary_of(positions, inverse_frequencies, scaling)
