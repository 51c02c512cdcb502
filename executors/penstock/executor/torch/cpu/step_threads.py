"""How many threads compute a layer: one where waking the others costs more than it saves.

The limit depends on the amount of work, not on a clock, so that a repeated step uses the same
threads.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

_SERIAL_WORK = 1 << 25
"""Multiplications of a layer. A layer wakes threads at five places, which takes some 50
microseconds each if they sleep in between; a core does this many in half a millisecond.
"""


@contextmanager
def threads_for(work: int) -> Generator[None]:
    """Compute layers of `work` multiplications inside."""
    num_threads = torch.get_num_threads()
    if work >= _SERIAL_WORK or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
