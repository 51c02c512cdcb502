"""Measures how much memory of a CUDA device is free and how much a call takes, and converts
out-of-memory errors to errors that name the setting to lower.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from penstock.executor.config import ExecutorConfig


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated: the device's free memory, and the memory that
    PyTorch's allocator has reserved but not allocated.
    """
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Call `run` once; return its peak additional memory, in bytes, as measured by the
    allocator.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def fitting(setting: str, config: ExecutorConfig) -> Generator[None]:
    """Convert an out-of-memory error, raised in the `with` block, to a ValueError that names
    `setting` as the setting to lower.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{setting} requires more memory than {config.device} has free next to the weights:"
            f" {error}"
        ) from error
