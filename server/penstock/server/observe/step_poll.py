"""The engine's steps, read from the flight recorder's memory as they come.

Owns the polling. The engine does not know that it is read.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from penstock.server.observe.listener import Consumer

log = logging.getLogger(__name__)

POLL_S = 0.25


class StepSource(Protocol):
    """Of a flight reader, what is needed here."""

    def new_steps(self) -> tuple[int, NDArray[Any], int]:
        """Epoch of the engine, rows since the last call, steps missed before them.

        Raises ValueError when the memory holds no recording.
        """
        ...

    @property
    def totals(self) -> dict[str, int]:
        """That engine's counts; names as in `flight.layout.TOTALS`."""
        ...


class StepPoll:
    """Tells `consumer` of new steps, four times a second, and `on_totals` of the counts then."""

    def __init__(
        self,
        source: StepSource,
        consumer: Consumer,
        on_totals: Callable[[int, dict[str, int]], None] | None = None,
    ) -> None:
        self._source = source
        self._consumer = consumer
        self._on_totals = on_totals
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
        try:
            epoch, rows, num_missed = self._source.new_steps()
        except ValueError as error:
            if self._is_readable:
                log.warning("the flight recorder cannot be read: %s", error)
            self._is_readable = False
            return
        self._is_readable = True
        if len(rows) or num_missed:
            self._consumer.take_steps(epoch, rows, num_missed)
            if self._on_totals is not None:
                self._on_totals(epoch, self._source.totals)

    async def _poll(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(POLL_S)
