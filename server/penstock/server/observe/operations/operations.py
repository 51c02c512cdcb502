"""The interface behind the operator ports (gRPC, status page), implemented by the observer process.

Owns the protocol alone, so that the ports do not depend on the implementation.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from penstock.server.observe.operations.snapshot import RequestView, Snapshot


class OperationsError(Exception):
    """The operation is not possible now; the message is for the operator."""


class Operations(Protocol):
    """Called on the observer's event loop."""

    def snapshot(self) -> Snapshot:
        """The current state of the service; sends no query to other processes."""
        ...

    async def live_requests(self) -> tuple[RequestView, ...]:
        """All live requests, by arrival. Queries engine and fronts; raises OperationsError."""
        ...

    async def drain(self, timeout_s: float | None) -> int:
        """Begin to drain; returns the number of live requests."""
        ...

    async def flight_record(self) -> bytes:
        """A copy of the flight recorder's memory in the file format. Raises OperationsError."""
        ...

    async def dump_flight_record(self, why: str) -> Path:
        """Write it to a file in the flight folder. Raises OperationsError."""
        ...

    async def set_log_level(self, level: str) -> None:
        """Set the log level of every process."""
        ...

    def profile(self, process: str, seconds: float) -> AsyncIterator[bytes]:
        """Sample `engine`, `front N` or `observer`; yields the profile as a speedscope file.

        Raises OperationsError.
        """
        ...
