"""The observer receives the reports of fronts over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from penstock.server.link.frames import Command, CommandKind, CommandResult
from penstock.server.link.wire import FrameBuffer
from penstock.server.observe.flight.layout import FACTS_OFFSET, GENERATION_OFFSET
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.flight_source import FlightSource
from penstock.server.observe.frames import (
    FrontView,
    Heartbeat,
    Hello,
    LiveAnswer,
    LiveQuery,
    ObserverFrame,
    Records,
    decode,
    encode,
)
from penstock.server.observe.front_receiver import FrontReceiver, FrontUnavailable
from penstock.server.observe.listeners import NO_TOTALS, ServiceListener, ServiceListeners
from penstock.server.observe.request_record import RequestRecord, encode_record
from support.flights import Flown, make_facts
from support.request_records import request_record

PATIENCE_S = 60.0


class Heard(ServiceListener):
    """A listener that keeps what it receives."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.beats: list[Heartbeat] = []
        self.gone: list[int] = []
        self.steps: list[tuple[int, int, int]] = []
        self.totals = NO_TOTALS
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        self.records += records
        self._notify()

    def take_heartbeat(self, beat: Heartbeat) -> None:
        self.beats.append(beat)
        self._notify()

    def take_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        self.steps.append((epoch, len(rows), num_missed))
        self.totals = totals

    def front_gone(self, front_id: int) -> None:
        self.gone.append(front_id)
        self._notify()

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(is_so)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._news:
                self._news.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class FakeFront:
    """A front's end of the connection."""

    def __init__(self, path: Path, front_id: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.setblocking(False)
        self._frames = FrameBuffer()
        self.send(Hello(front_id=front_id, pid=1000 + front_id))

    def send(self, frame: ObserverFrame) -> None:
        self.socket.sendall(encode(frame))

    async def next(self) -> ObserverFrame:
        loop = asyncio.get_running_loop()
        data = await asyncio.wait_for(loop.sock_recv(self.socket, 1 << 16), PATIENCE_S)
        (body,) = self._frames.feed(data)
        return decode(body)


@contextlib.asynccontextmanager
async def hub_at(path: Path, heard: Heard) -> AsyncGenerator[FrontReceiver]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    hub = FrontReceiver(heard)
    await hub.start(listener)
    try:
        yield hub
    finally:
        await hub.close(0.0)
        listener.close()


def beat(front_id: int, num_live: int) -> Heartbeat:
    counts: dict[str, Any] = dict.fromkeys(
        (
            *("num_streams", "num_backlog_tokens", "num_submitted", "num_cut_readers"),
            *("num_late_events", "num_unknown_fields", "num_internal_errors", "num_records"),
        ),
        0,
    )
    return Heartbeat(
        front_id=front_id,
        pid=1,
        epoch=1,
        is_draining=False,
        is_engine_up=True,
        num_live=num_live,
        **counts,
    )


async def test_what_fronts_tell_is_heard_and_their_going_too(tmp_path: Path) -> None:
    heard = Heard()
    path = tmp_path / "observer.sock"
    async with hub_at(path, heard) as hub:
        one, two = FakeFront(path, 1), FakeFront(path, 2)
        records = [request_record(number) for number in range(3)]
        one.send(Records(payloads=tuple(map(encode_record, records))))
        one.send(beat(1, num_live=4))
        two.send(beat(2, num_live=5))
        await heard.until(lambda: len(heard.beats) == 2)
        assert heard.records == records
        assert hub.pids == {1: 1001, 2: 1002}
        assert hub.num_live == 9
        two.socket.close()
        await heard.until(lambda: heard.gone == [2])
        assert hub.front_ids == (1,)
        one.socket.close()


async def test_a_record_that_cannot_be_read_takes_no_other_along(tmp_path: Path) -> None:
    heard = Heard()
    path = tmp_path / "observer.sock"
    async with hub_at(path, heard) as hub:
        front = FakeFront(path, 1)
        good = request_record()
        front.send(Records(payloads=(b"nonsense", encode_record(good), b"")))
        await heard.until(lambda: heard.records)
        assert heard.records == [good]
        assert hub.num_unreadable == 2
        front.socket.close()


async def test_live_requests_of_all_fronts_but_not_of_a_silent_one(tmp_path: Path) -> None:
    heard = Heard()
    path = tmp_path / "observer.sock"
    async with hub_at(path, heard) as hub:
        assert await hub.live_views(PATIENCE_S) == ((), True)
        one, two = FakeFront(path, 1), FakeFront(path, 2)
        one.send(beat(1, 0))
        two.send(beat(2, 0))
        await heard.until(lambda: len(heard.beats) == 2)
        texts: dict[str, Any] = dict.fromkeys(("request_id", "tenant", "trace_id", "phase"), "x")
        names = [field.name for field in dataclasses.fields(FrontView)]
        counts: dict[str, Any] = {name: 0 for name in names if name.startswith("num_")}
        view = FrontView(
            **counts,
            **texts,
            front_id=1,
            keys=(),
            priority=0,
            arrival_s=0.0,
            history=(),
        )
        asked = asyncio.create_task(hub.live_views(PATIENCE_S))
        query = await one.next()
        assert isinstance(query, LiveQuery)
        one.send(LiveAnswer(ticket=query.ticket, views=(view,), is_last=False))
        one.send(LiveAnswer(ticket=query.ticket, views=(view,)))
        await two.next()
        two.socket.close()  # dies while it is asked
        assert await asked == ((view, view), False)
        one.socket.close()


async def test_orders_reach_their_front(tmp_path: Path) -> None:
    heard = Heard()
    path = tmp_path / "observer.sock"
    async with hub_at(path, heard) as hub:
        front = FakeFront(path, 1)
        front.send(beat(1, 0))
        await heard.until(lambda: heard.beats)
        asked = asyncio.create_task(hub.order(1, CommandKind.PROFILE, "1", PATIENCE_S))
        order = await front.next()
        assert isinstance(order, Command)
        front.send(CommandResult(ticket=order.ticket, payload=b"done"))
        assert (await asked).payload == b"done"
        with pytest.raises(FrontUnavailable, match="there is no front 2"):
            await hub.order(2, CommandKind.PROFILE, "1", PATIENCE_S)
        with pytest.raises(FrontUnavailable, match="front 1 does not answer"):
            await hub.order(1, CommandKind.PROFILE, "1", 0.0)
        front.socket.close()


async def test_what_fronts_said_before_they_ended_is_heard_out(tmp_path: Path) -> None:
    heard = Heard()
    path = tmp_path / "observer.sock"
    async with hub_at(path, heard) as hub:
        front = FakeFront(path, 1)
        front.send(beat(1, 0))
        await heard.until(lambda: heard.beats)
        front.send(Records(payloads=(encode_record(request_record()),) * 100))
        front.socket.close()
        await hub.close(PATIENCE_S)
        assert len(heard.records) == 100


async def test_one_listener_that_trips_takes_nothing_away_from_the_others() -> None:
    class Trips(Heard):
        def take_records(self, records: Sequence[RequestRecord]) -> None:
            raise RuntimeError("a bug")

    heard = Heard()
    fanout = ServiceListeners(Trips(), heard)
    fanout.take_records([request_record()])
    fanout.take_heartbeat(beat(1, 0))
    assert len(heard.records) == len(heard.beats) == 1
    assert fanout.num_failures == 1


def test_steps_are_read_and_a_recorder_that_cannot_be_is_no_end() -> None:
    heard, flown = Heard(), Flown()
    source = FlightSource(flown.fd, heard)
    flown.submit(1, 20, 5)
    flown.step()
    flown.step()
    source.read()
    source.read()  # nothing new: no event
    next_generation = (4).to_bytes(8, "little")
    os.pwrite(flown.fd, b"?", FACTS_OFFSET)
    os.pwrite(flown.fd, next_generation, GENERATION_OFFSET)
    source.read()
    FlightWriter(flown.fd, make_facts(epoch=7))
    source.read()
    assert heard.steps == [(1, 2, 0)]
    assert heard.totals["num_output_tokens"] == 2
