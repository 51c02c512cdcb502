"""The time limit of waits in tests, and a wait for changes that no event reports."""

import asyncio
from collections.abc import Callable

TEST_TIMEOUT_S = 100.0
"""Seconds; only a failing test waits that long."""


async def until_true(condition: Callable[[], bool]) -> None:
    """Yield to the running event loop until `condition` holds. Raises TimeoutError after
    TEST_TIMEOUT_S.
    """
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
