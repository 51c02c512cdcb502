"""Chooses the number of threads of a step: a single one if synchronisation costs more time than
parallelism saves.

Results do not depend on the number of threads.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

_NUM_BARRIERS = 12
"""Number of barriers in a layer."""
_MULTIPLICATIONS_PER_US = 60_000
_BYTES_PER_US = 15_000
"""Memory bandwidth of one core, bytes per microsecond."""
_NUM_MEASURED = 9
_MEASURE_EVERY_S = 0.25


class StepThreads:
    """Chooses the number of threads for each step. `measure` returns the duration of a barrier in
    microseconds. It is called at most four times per second, and the median of the latest results
    is used, because the load of other processes changes.
    """

    def __init__(
        self, measure: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._measure = measure
        self._clock = clock
        self._measured: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._measured_at = -_MEASURE_EVERY_S

    @contextmanager
    def computing(self, multiplications: int, num_bytes: int) -> Generator[None]:
        """Use a single thread within this context, or PyTorch's number of threads if more threads
        save time.

        `multiplications`: their number in one layer. `num_bytes`: bytes of weights that one layer
        reads.
        """
        num_threads = torch.get_num_threads()
        single_us = max(multiplications / _MULTIPLICATIONS_PER_US, num_bytes / _BYTES_PER_US)
        saved_us = single_us * (1 - 1 / num_threads)
        if num_threads == 1 or saved_us >= _NUM_BARRIERS * self._barrier_us():
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    def _barrier_us(self) -> float:
        now = self._clock()
        if now >= self._measured_at + _MEASURE_EVERY_S:
            self._measured_at = now
            self._measured.append(self._measure())
        return statistics.median(self._measured)
