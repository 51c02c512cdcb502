"""The flight recorder's memory in the observer's hands: its steps as they come, copies, files.

Owns one reader of that memory. Whoever writes there does not notice.
"""

import time
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from penstock.server.observe.flight.dump import dump
from penstock.server.observe.flight.reader import FlightReader


class FlightBox:
    """`fd`: the memory, inherited. Raises FlightError (a ValueError) or OSError for none.

    `port`: the service's, for the names of files. `copied` and `dumped` take their time and may be
    called from any thread; the rest is one thread's.
    """

    def __init__(self, fd: int, folder: Path | None, port: int) -> None:
        self._fd = fd
        self._folder = folder
        self._port = port
        self._reader = FlightReader(fd)

    def new_steps(self) -> tuple[int, NDArray[Any], int]:
        """The engine's epoch (0 before the first), its steps since the last call, missed ones."""
        rows, num_missed = self._reader.new_steps()
        facts = self._reader.facts
        return 0 if facts is None else facts.epoch, rows, num_missed

    @property
    def totals(self) -> dict[str, int]:
        """Counts since that engine's start."""
        return self._reader.totals

    def copied(self) -> bytes:
        """As its files hold it. Raises FlightError before the first engine."""
        reader = FlightReader(self._fd)
        try:
            return reader.copy(time.monotonic())
        finally:
            reader.close()

    def dumped(self, why: str) -> Path:
        """Written to a file of the flight folder. Raises FlightError, OSError."""
        return dump(self._fd, self._folder, why, port=self._port)
