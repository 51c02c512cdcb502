"""How the demo measures the capacity for its scene on deadlines, and how it checks that the load
exceeded that capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from penstock.client import Client
from penstock.tools.demo import deadline


class _CountingClient:
    """Counts concurrent requests. A request ends after the event loop has run all others."""

    def __init__(self) -> None:
        self.num_running = 0
        self.counts: list[int] = []

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[None]:
        self.num_running += 1
        await asyncio.sleep(0)
        self.counts.append(self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        yield None


async def test_capacity_is_measured_with_all_slots_busy() -> None:
    client = _CountingClient()
    assert await deadline.measured_capacity(cast(Client, client)) > 0.0
    num_slots = int(deadline.SERVE_ARGS[1])
    assert set(client.counts) == {num_slots}


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (11 / 16, True), (0.9, False)])
def test_a_load_that_is_served_in_time_is_no_overload(share: float, expected: bool) -> None:
    assert deadline.was_overload(share) is expected
