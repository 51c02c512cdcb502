"""Measures the lag of an event loop with a ticker in the loop and a reader in another process.

Both processes map the same file. For each tick it contains the due time, the lateness, and the CPU
time of the loop's thread and of its process since the previous tick. A delay that exceeds the CPU
time of the process was caused by another process. The loop ticks only while the reader requests it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER_VARIABLE = "PENSTOCK_BENCHMARK_TICKS"
"""Folder in which ticking processes keep their files, each named after its process id."""

TICK_S = 0.005
_IDLE_S = 0.05
_NUM_TICKS = 1 << 15
_HEADER_BYTES = 16
_NUM_COLUMNS = 4
_NUM_BYTES = _HEADER_BYTES + 8 * _NUM_COLUMNS * _NUM_TICKS


class Ticker:
    """Ticks on the running event loop until the loop ends. `clock` returns monotonic seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        header, self._ticks = _mapped(folder / str(os.getpid()), is_new=True)
        self._header = header
        self._clock = clock
        self._num = 0
        self._due_s = 0.0
        self._thread_s = self._process_s = 0.0

    def start(self) -> None:
        self._due_s = self._clock()
        self._wait(TICK_S)

    def _wait(self, delay_s: float) -> None:
        now_s = self._clock()
        # Ticks missed while the loop was blocked count as one late tick.
        self._due_s = max(self._due_s, now_s - delay_s) + delay_s
        asyncio.get_running_loop().call_later(max(0.0, self._due_s - now_s), self._tick)

    def _tick(self) -> None:
        thread_s, process_s = time.thread_time(), time.process_time()
        used = thread_s - self._thread_s, process_s - self._process_s
        self._thread_s, self._process_s = thread_s, process_s
        if not self._header[0]:
            self._wait(_IDLE_S)
            return
        late_s = self._clock() - self._due_s
        self._ticks[self._num % _NUM_TICKS] = self._due_s, late_s, *used
        self._num += 1
        self._wait(TICK_S)


class TickReader:
    """Reads the ticks of the process `pid`. Raises OSError if that process has no file of ticks."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._header, self._ticks = _mapped(folder / str(pid), is_new=False)

    def switch(self, *, is_on: bool) -> None:
        """Turn ticking on or off."""
        self._header[0] = is_on

    def lags_ms(self, start_s: float, end_s: float) -> NDArray[np.float64]:
        """Return the lateness, ms, float64 [n] of the ticks that were due in this period of the
        monotonic clock.
        """
        lags: NDArray[np.float64] = self._between(start_s, end_s)[:, 1] * 1e3
        return lags

    def longest_ms(self, start_s: float, end_s: float) -> tuple[float, float, float]:
        """Return the greatest lateness of a tick that was due in this period, and the CPU time of
        the loop's thread and of its process since the tick before it, ms; zeros without ticks.
        """
        ticks = self._between(start_s, end_s)
        if not len(ticks):
            return 0.0, 0.0, 0.0
        _, late_s, thread_s, process_s = ticks[ticks[:, 1].argmax()].tolist()
        return late_s * 1e3, thread_s * 1e3, process_s * 1e3

    def _between(self, start_s: float, end_s: float) -> NDArray[np.float64]:
        due_s = self._ticks[:, 0]
        between: NDArray[np.float64] = self._ticks[(due_s >= start_s) & (due_s < end_s)]
        return between


def start_ticking() -> None:
    """Start a `Ticker` on the running loop if the environment variable FOLDER_VARIABLE is set."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        Ticker(Path(folder)).start()


def _mapped(path: Path, *, is_new: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if is_new:
        made = path.with_suffix(".new")
        made.write_bytes(bytes(_NUM_BYTES))
        made.replace(path)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _NUM_BYTES)
    header = np.frombuffer(memory, dtype=np.int64, count=2)
    ticks = np.frombuffer(memory, dtype=np.float64, offset=_HEADER_BYTES)
    return header, ticks.reshape(_NUM_TICKS, _NUM_COLUMNS)
