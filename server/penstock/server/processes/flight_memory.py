"""The flight recorder's memory in the supervisor: created once, dumped after a crash.

Owns the descriptor that engines and observers inherit. It outlives its writers; the
layout of the rows is defined elsewhere.
"""

import asyncio
import logging
import os

from penstock.server.observe.config import FlightConfig

log = logging.getLogger(__name__)


class FlightMemory:
    """`fd` is -1 before `create`, and when no memory could be allocated."""

    def __init__(self, config: FlightConfig) -> None:
        self.fd = -1
        self._config = config
        self._port = 0
        self._dumping = asyncio.Lock()

    def create(self, port: int) -> None:
        """Create the shared memory of the service on `port`.

        If that fails, the service runs without it and logs an error.
        """
        self._port = port
        # Late: it takes numpy along, and the command line wants to be quick before this.
        from penstock.server.observe.flight.memory import create_memory

        try:
            self.fd = create_memory(self._config.num_steps, "penstock-flight")
        except (OSError, ValueError) as error:
            log.error("there is no flight recorder: %s", error)  # noqa: TRY400 (in one line)

    def close(self) -> None:
        """Release it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def dump(self, why: str) -> None:
        """Write the content to a file in the flight folder; log its path or the failure."""
        from penstock.server.observe.flight.dump import dump

        if self.fd < 0:
            log.warning("the flight recorder is off: no record was written")
            return
        async with self._dumping:
            try:
                path = await asyncio.to_thread(
                    dump, self.fd, self._config.folder, why, port=self._port
                )
            except (OSError, ValueError) as error:
                log.warning("the flight record was not written: %s", error)
            else:
                log.info("flight record (%s): %s", why, path)
