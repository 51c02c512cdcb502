"""A model's tensors from its files onto a device.

Owns the copy. transformers maps the files into memory and reads nothing
from them, so this copy is the load: it goes from the files to the device one tensor after another,
and the host never holds a second copy.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from penstock.executor.torch.errors import ModelLoadError
from penstock.executor.torch.load_progress import LoadProgress


def select_device(device: str) -> torch.device:
    """The device with its number. A CUDA device becomes the current one: pinned host memory and
    libraries belong to that.

    Raises ModelLoadError when it does not exist.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ModelLoadError(
            f"device {device} requires CUDA, which PyTorch does not find here: use device cpu"
        )
    count = torch.cuda.device_count()
    index = found.index if ":" in device else torch.cuda.current_device()
    if index >= count:
        raise ModelLoadError(
            f"device {device} does not exist: PyTorch finds {count} CUDA device(s) here"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def move_module(
    module: nn.Module, device: torch.device, clock: Callable[[], float] = time.monotonic
) -> None:
    """Move every parameter and buffer, shared ones once, with progress in the log."""
    total = _bytes_away(module, device)
    if not total:
        return
    progress = LoadProgress(f"loading onto {device}", total, clock)
    for part in module.modules():
        if next(part.children(), None) is not None:
            continue
        num_bytes = _bytes_away(part, device)
        part.to(device)
        progress.add(num_bytes)
    module.to(device)  # what modules with children hold themselves
    progress.finish()


def _bytes_away(module: nn.Module, device: torch.device) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.device != device)
