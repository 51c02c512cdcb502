"""The number of threads of a layer: one if synchronising costs more than the others save.

Owns the estimate. A result does not depend on the number of threads.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

_NUM_BARRIERS = 12
"""Places of a layer where threads meet."""
_MULTIPLICATIONS_PER_US = 60_000
_BYTES_PER_US = 15_000
"""Of one core, from memory."""


@contextmanager
def threads_for(multiplications: int, num_bytes: int, barrier_us: float) -> Generator[None]:
    """Compute layers inside that take this many multiplications and read this many bytes, with a
    barrier of `barrier_us`."""
    num_threads = torch.get_num_threads()
    alone_us = max(multiplications / _MULTIPLICATIONS_PER_US, num_bytes / _BYTES_PER_US)
    if alone_us * (1 - 1 / num_threads) >= _NUM_BARRIERS * barrier_us or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
