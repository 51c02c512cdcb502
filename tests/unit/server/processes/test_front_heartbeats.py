"""The heartbeats of a front, with its event loop lag on a simulated clock."""

from __future__ import annotations

import asyncio

import pytest

from penstock.server.processes.front_reporter import HeartbeatTimer


class Ticks:
    """A clock that advances by a second with each reading, and a record of the heartbeats."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.heartbeats: list[tuple[float, ...]] = []
        self.beaten = asyncio.Event()

    def clock(self) -> float:
        # Each reading advances the clock, so that the loop is never waited for.
        self.now_s += 1.0
        return self.now_s

    def heartbeat(self, lags_s: tuple[float, ...]) -> None:
        self.heartbeats.append(lags_s)
        self.beaten.set()

    async def next(self) -> tuple[float, ...]:
        self.beaten.clear()
        await asyncio.wait_for(self.beaten.wait(), 60)
        return self.heartbeats[-1]


async def test_heartbeats_are_sent_at_the_start_and_at_the_end() -> None:
    ticks = Ticks()
    timer = HeartbeatTimer(ticks.heartbeat, ticks.clock)
    timer.start()
    assert ticks.heartbeats == [()]
    timer.stop()
    assert ticks.heartbeats == [(), ()]
    timer.stop()
    assert len(ticks.heartbeats) == 2


async def test_a_heartbeat_reports_how_late_each_of_ten_ticks_was() -> None:
    ticks = Ticks()
    timer = HeartbeatTimer(ticks.heartbeat, ticks.clock)
    timer.start()
    lags_s = await ticks.next()
    timer.stop()
    # A tick that is a second late is one late tick; the next is due a tick after it.
    assert len(lags_s) == 10
    assert lags_s == pytest.approx([1.0] * 10)
