"""Buffers that all layers of a step share, allocated on first use."""

import torch
from torch import Tensor


class Scratch:
    """Buffers by name and shape. Each name is used with one dtype only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer with this name and shape; its content is not cleared."""
        key = (name, shape)
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = torch.empty(shape, dtype=dtype, device=self._device)
        return found
