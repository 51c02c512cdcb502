"""Turns of the event loop for responses that take long to make."""

import asyncio
import time
from collections.abc import Iterator
from typing import Final, TypeVar

_MAX_TURN_S: Final = 0.002
T = TypeVar("T")


class LoopTurns:
    """Makes the parts of one response and yields to the event loop if that takes long.

    One clock for all of them: a stream whose events are all there gives them without a turn.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    async def make(self, parts: Iterator[T]) -> list[T]:
        """Make all parts."""
        made: list[T] = []
        for part in parts:
            made.append(part)
            if time.perf_counter() - self._began_s > _MAX_TURN_S:
                await asyncio.sleep(0)
                self._began_s = time.perf_counter()
        return made
