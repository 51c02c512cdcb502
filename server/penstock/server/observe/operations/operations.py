"""What the operators' doors (gRPC, the web page) may ask for; the observer process implements it.

Owns the protocol alone, so that neither door knows how the answers are found.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from penstock.server.observe.operations.snapshot import RequestView, Snapshot


class OperationsError(Exception):
    """What was asked for cannot be had now; the message is for the operator."""


class Operations(Protocol):
    """Asked on the observer's event loop."""

    def snapshot(self) -> Snapshot:
        """The service now; costs no other process anything."""
        ...

    async def live_requests(self) -> tuple[RequestView, ...]:
        """All that have not ended, by arrival. Asks engine and fronts; raises OperationsError."""
        ...

    async def drain(self, timeout_s: float | None) -> int:
        """Begin to drain; requests that live now."""
        ...

    async def flight_record(self) -> bytes:
        """The flight recorder's memory, copied, as its files hold it. Raises OperationsError."""
        ...

    async def dump_flight_record(self, why: str) -> Path:
        """Write it to a file of the flight folder. Raises OperationsError."""
        ...

    async def set_log_level(self, level: str) -> None:
        """Of every process, until it is set again."""
        ...

    def profile(self, process: str, seconds: float) -> AsyncIterator[bytes]:
        """Sample `engine`, `front N` or `observer` for so long; the profile, as a speedscope file.

        Raises OperationsError.
        """
        ...
