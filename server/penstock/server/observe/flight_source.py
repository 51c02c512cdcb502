"""Reads the engine's steps from the memory of the flight recorder, and copies that memory.

The flight recorder keeps the last steps of the engine in shared memory. Reading never blocks the
engine.
"""

import asyncio
import logging
import time
from pathlib import Path

from penstock.server.observe.flight.reader import FlightReader, dump
from penstock.server.observe.listeners import ServiceListener

logger = logging.getLogger(__name__)

POLL_S = 0.25


class FlightSource:
    """Passes new steps to `listener` every `POLL_S` seconds.

    `fd` is the inherited descriptor of the memory; the constructor raises FlightError (a
    ValueError) or OSError if it is invalid. `folder` is the folder of flight files, None for the
    default; `port` is the port of the service, for the names of files. `copy` and `dump` are
    slow and may be called from any thread; all other methods must be called from one thread.
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
        """Poll on the running event loop until `stop`."""
        self._task = asyncio.create_task(self._poll(), name="steps")

    async def stop(self) -> None:
        """Stop polling, then pass the last steps to the listener."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.read()

    def read(self) -> None:
        """Pass new steps to the listener. If the memory cannot be read, log one warning; further
        failures are not logged until it can be read again."""
        reader = self._reader
        try:
            rows, num_missed = reader.new_steps()
            facts = reader.facts
        except ValueError as error:
            if self._is_readable:
                logger.warning("the flight recorder cannot be read: %s", error)
            self._is_readable = False
            return
        self._is_readable = True
        if facts is not None and (len(rows) or num_missed):
            self._listener.add_steps(facts.epoch, rows, num_missed, reader.totals)

    def copy(self) -> bytes:
        """Return a copy of the memory in the format of a flight file.

        Raises FlightError if no engine has written yet, or one is initialising the memory.
        """
        reader = FlightReader(self._fd)
        try:
            return reader.copy(time.monotonic())
        finally:
            reader.close()

    def dump(self, why: str) -> Path:
        """Write the memory to a file in the flight folder and return its path.

        Raises FlightError if no engine has written yet, or one is initialising the memory, and
        OSError if the file cannot be written.
        """
        return dump(self._fd, self._folder, why, port=self._port)

    async def _poll(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(POLL_S)
