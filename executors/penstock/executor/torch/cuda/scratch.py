"""Memory of one step that every layer writes again, allocated by the first of them."""

import torch
from torch import Tensor


class Scratch:
    """Tensors by name and shape. A name stands for one number format."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that name, with what was last written to it."""
        key = (name, shape)
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = torch.empty(shape, dtype=dtype, device=self._device)
        return found
