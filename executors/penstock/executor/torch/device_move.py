"""Moves a model's tensors from its files to a device, with progress in the log.

transformers maps the files into memory and reads nothing from them, so this copy is the load: one
tensor after another goes from the files to the device, and the host never holds a second copy.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from penstock.executor.torch.errors import ModelLoadError

_log = logging.getLogger(__name__)
_GIB = 1 << 30
_REPORT_EVERY_S = 2.0


def select_device(device: str) -> torch.device:
    """The device with its number. A CUDA device becomes the current one: pinned host memory and
    libraries belong to that.

    Raises ModelLoadError when it does not exist.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ModelLoadError(f"device {device} was requested, but CUDA is not available")
    count = torch.cuda.device_count()
    index = found.index if ":" in device else torch.cuda.current_device()
    if index >= count:
        raise ModelLoadError(f"device {device} was requested; CUDA devices here: {count}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def move_module(
    module: nn.Module, device: torch.device, clock: Callable[[], float] = time.monotonic
) -> None:
    """Move every parameter and buffer, shared ones once, with progress in the log."""
    total = _bytes_away(module, device)
    if not total:
        return
    begun_s = reported_s = clock()
    moved = 0
    for part in module.modules():
        if next(part.children(), None) is not None:
            continue
        moved += _bytes_away(part, device)
        part.to(device)
        if clock() - reported_s >= _REPORT_EVERY_S:
            reported_s = clock()
            _log.info("loading: %.1f of %.1f GiB are on %s", moved / _GIB, total / _GIB, device)
    module.to(device)  # modules with children may have their own
    taken_s = clock() - begun_s
    _log.info("loaded %.1f GiB onto %s in %.1f s", total / _GIB, device, taken_s)


def _bytes_away(module: nn.Module, device: torch.device) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.device != device)
