"""Callers that never pause, and who answered them.

Owns the tally and the waiting for it. A request that fails is kept, and the load continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator

from penstock.client import Client, PenstockError, TokenPrompt

PATIENCE_S = 60.0
PROMPT = TokenPrompt(ids=(5, 6, 7, 8))


class SteadyLoad:
    """`answered`: requests by the name of the model that answered; `failures`: all there were."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.failures: list[PenstockError] = []
        self._news = asyncio.Condition()

    async def call(self, client: Client) -> None:
        """One caller, one request after the other."""
        while True:
            try:
                result = await client.generate_once(PROMPT, max_tokens=4, deadline_s=PATIENCE_S)
            except PenstockError as error:
                self.failures.append(error)
                assert len(self.failures) < 100, self.failures[0]
            else:
                self.answered[result.accepted.model] += 1
            async with self._news:
                self._news.notify_all()

    async def more(self, *names: str, count: int = 10) -> Counter[str]:
        """Wait until each of these has answered so many more; all answers meanwhile."""
        before = self.answered.copy()
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(
                lambda: all(self.answered[name] >= before[name] + count for name in names)
            )
        return self.answered - before

    async def without(self, name: str, count: int = 30) -> None:
        """Wait for so many answers in a row that are not this one's."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                before = self.answered.copy()
                await self._news.wait_for(
                    lambda: (self.answered - before).total() >= count  # noqa: B023 (awaited here)
                )
                if self.answered[name] == before[name]:
                    return


@contextlib.asynccontextmanager
async def steady_load(client: Client, num_callers: int = 6) -> AsyncGenerator[SteadyLoad]:
    """So many callers at a time, until the block ends."""
    load = SteadyLoad()
    callers = [asyncio.create_task(load.call(client)) for _ in range(num_callers)]
    try:
        yield load
    finally:
        for caller in callers:
            caller.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
    for outcome in ended:
        assert isinstance(outcome, asyncio.CancelledError), outcome
