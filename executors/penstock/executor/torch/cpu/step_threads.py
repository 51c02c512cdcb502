"""The number of threads of a layer: one if synchronising costs more than the others save.

Owns the estimate. A result does not depend on the number of threads.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

_NUM_BARRIERS = 12
"""Places of a layer where threads meet."""
_MULTIPLICATIONS_PER_US = 60_000
_BYTES_PER_US = 15_000
"""Of one core, from memory."""
_NUM_MEASURED = 9
_MEASURE_EVERY_S = 0.25


class StepThreads:
    """The choice for each step. `measure` returns the microseconds of a barrier; it is called four
    times a second at most, and the median of the last calls counts: other processes come and go, at
    the start of a service above all.
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
        """Context in which layers that take this many multiplications and read this many bytes are
        computed.
        """
        num_threads = torch.get_num_threads()
        alone_us = max(multiplications / _MULTIPLICATIONS_PER_US, num_bytes / _BYTES_PER_US)
        saved_us = alone_us * (1 - 1 / num_threads)
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
