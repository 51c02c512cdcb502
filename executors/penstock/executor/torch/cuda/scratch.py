"""Buffers of one step that all layers share, allocated on first use."""

import torch
from torch import Tensor


class Scratch:
    """Buffers by name and shape. Each name is used with one number format only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer of that name and shape, with its last content."""
        key = (name, shape)
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = torch.empty(shape, dtype=dtype, device=self._device)
        return found
