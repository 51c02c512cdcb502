"""Reads the engine's steps from the flight recorder's memory, and makes copies of it.

Owns the polling and one reader of that memory. Reading does not affect the engine.
"""

import asyncio
import logging
import time
from pathlib import Path

from penstock.server.observe.flight.reader import FlightReader, dump
from penstock.server.observe.listeners import ServiceListener

log = logging.getLogger(__name__)

POLL_S = 0.25


class FlightSource:
    """Passes new steps to `listener` four times a second.

    `fd`: the inherited memory. Raises FlightError (a ValueError) or OSError if it is invalid.
    `port`: of the service, for file names. `copied` and `dumped` are slow and may be called from
    any thread; all other methods from one thread.
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
        """Stop after a last poll."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.read()

    def read(self) -> None:
        """Pass on new steps."""
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
        """Return a copy in the file format. Raises FlightError before the first engine."""
        reader = FlightReader(self._fd)
        try:
            return reader.copy(time.monotonic())
        finally:
            reader.close()

    def dumped(self, why: str) -> Path:
        """Write a file in the flight folder; return its path. Raises FlightError, OSError."""
        return dump(self._fd, self._folder, why, port=self._port)

    async def _poll(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(POLL_S)
