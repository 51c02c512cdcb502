"""The engine's steps, read from the flight recorder's memory as they come, and copies of it.

Owns the polling and one reader of that memory. The engine does not notice that it is read.
"""

import asyncio
import logging
import time
from pathlib import Path

from penstock.server.observe.flight.dump import dump
from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.service_listeners import ServiceListener

log = logging.getLogger(__name__)

POLL_S = 0.25


class FlightSource:
    """Passes new steps to `listener` four times a second.

    `fd`: the memory, inherited. Raises FlightError (a ValueError) or OSError for none. `port`: the
    service's, for the names of files. `copied` and `dumped` take their time and may be called from
    any thread; the rest is one thread's.
    """

    def __init__(
        self, fd: int, listener: ServiceListener, *, folder: Path | None = None, port: int = 0
    ) -> None:
        self._fd = fd
        self._listener = listener
        self._folder = folder
        self._port = port
        self._reader = FlightReader(fd)
        self._task: asyncio.Task[None] | None = None
        self._is_readable = True

    def start(self) -> None:
        """Poll on the running loop until `stop`."""
        self._task = asyncio.create_task(self._poll(), name="steps")

    async def stop(self) -> None:
        """No more polls, after one last."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.read()

    def read(self) -> None:
        """Pass on what is new."""
        reader = self._reader
        try:
            rows, num_missed = reader.new_steps()
            facts = reader.facts
        except ValueError as error:
            if self._is_readable:
                log.warning("the flight recorder cannot be read: %s", error)
            self._is_readable = False
            return
        self._is_readable = True
        if facts is not None and (len(rows) or num_missed):
            self._listener.take_steps(facts.epoch, rows, num_missed, reader.totals)

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

    async def _poll(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(POLL_S)
