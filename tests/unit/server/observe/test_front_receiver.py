"""The observer receives the reports of fronts over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from penstock.server.ipc.frames import Command, CommandResult, Profile
from penstock.server.observe.flight.layout import FACTS_OFFSET, GENERATION_OFFSET
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.flight_source import FlightSource
from penstock.server.observe.frames import (
    Heartbeat,
    Hello,
    LiveAnswer,
    LiveQuery,
    Records,
)
from penstock.server.observe.front_receiver import FrontReceiver, FrontUnavailable
from penstock.server.observe.listeners import NO_TOTALS, ServiceListener, ServiceListeners
from penstock.server.observe.request_record import RequestRecord, encode_record
from support.flights import RecordedEngine
from support.observer_connection import ObserverConnection
from support.reports import front_request_view, heartbeat, make_facts, request_record
from support.timeout import TEST_TIMEOUT_S


class RecordingListener(ServiceListener):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.heartbeats: list[Heartbeat] = []
        self.gone: list[int] = []
        self.steps: list[tuple[int, int, int]] = []
        self.totals = NO_TOTALS
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        self.records += records
        self._notify()

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeats.append(heartbeat)
        self._notify()

    def add_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        self.steps.append((epoch, len(rows), num_missed))
        self.totals = totals

    def front_disconnected(self, front_id: int) -> None:
        self.gone.append(front_id)
        self._notify()

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            await self._changed.wait_for(is_so)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class FakeFront(ObserverConnection):
    """A front's end of a connection to the receiver."""

    def __init__(self, path: Path, front_id: int) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        super().__init__(connected)
        self.send(Hello(front_id=front_id, pid=1000 + front_id))


@dataclasses.dataclass
class Harness:
    """A receiver on a socket, its listener, and the fronts that a test has connected."""

    path: Path
    receiver: FrontReceiver
    recorded: RecordingListener
    fronts: list[FakeFront] = dataclasses.field(default_factory=list)

    def front(self, front_id: int) -> FakeFront:
        self.fronts.append(FakeFront(self.path, front_id))
        return self.fronts[-1]

    async def known_front(self, front_id: int) -> FakeFront:
        """Return a connected front after the receiver has got a heartbeat from it."""
        front, num_before = self.front(front_id), len(self.recorded.heartbeats)
        front.send(heartbeat(front_id))
        await self.recorded.until(lambda: len(self.recorded.heartbeats) > num_before)
        return front


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[Harness]:
    path, recorded = tmp_path / "observer.sock", RecordingListener()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        receiver = FrontReceiver(recorded)
        await receiver.start(listener)
        harness = Harness(path, receiver, recorded)
        yield harness
        await receiver.close(0.0)
        for front in harness.fronts:
            front.socket.close()


async def test_reports_of_fronts_and_their_disconnects_are_received(harness: Harness) -> None:
    recorded = harness.recorded
    one, two = harness.front(1), harness.front(2)
    records = [request_record(number) for number in range(3)]
    one.send(Records(payloads=tuple(map(encode_record, records))))
    one.send(heartbeat(1, num_live=4))
    two.send(heartbeat(2, num_live=5))
    await recorded.until(lambda: len(recorded.heartbeats) == 2)
    assert recorded.records == records
    assert harness.receiver.pids == {1: 1001, 2: 1002}
    assert harness.receiver.num_live == 9
    two.socket.close()
    await recorded.until(lambda: recorded.gone == [2])
    assert harness.receiver.front_ids == (1,)


async def test_a_record_that_cannot_be_read_does_not_affect_others(harness: Harness) -> None:
    good = request_record()
    harness.front(1).send(Records(payloads=(b"nonsense", encode_record(good), b"")))
    await harness.recorded.until(lambda: harness.recorded.records)
    assert harness.recorded.records == [good]
    assert harness.receiver.num_unreadable == 2


async def test_live_requests_of_all_fronts_but_not_of_a_silent_one(harness: Harness) -> None:
    assert await harness.receiver.request_views(TEST_TIMEOUT_S) == ((), True)
    one, two = await harness.known_front(1), await harness.known_front(2)
    view = front_request_view([1])
    asked = asyncio.create_task(harness.receiver.request_views(TEST_TIMEOUT_S))
    query = await one.next()
    assert isinstance(query, LiveQuery)
    one.send(LiveAnswer(ticket=query.ticket, views=(view,), is_last=False))
    one.send(LiveAnswer(ticket=query.ticket, views=(view,)))
    await two.next()
    two.socket.close()  # dies while it is asked
    assert await asked == ((view, view), False)


async def test_orders_reach_their_front(harness: Harness) -> None:
    receiver, front = harness.receiver, await harness.known_front(1)
    asked = asyncio.create_task(receiver.command(1, Profile(seconds=1.0), TEST_TIMEOUT_S))
    order = await front.next()
    assert isinstance(order, Command)
    front.send(CommandResult(ticket=order.ticket, payload=b"done"))
    assert (await asked).payload == b"done"
    with pytest.raises(FrontUnavailable, match="there is no front 2"):
        await receiver.command(2, Profile(seconds=1.0), TEST_TIMEOUT_S)
    with pytest.raises(FrontUnavailable, match="front 1 does not respond"):
        await receiver.command(1, Profile(seconds=1.0), 0.0)


async def test_reports_sent_before_a_front_ended_are_received(harness: Harness) -> None:
    front = await harness.known_front(1)
    front.send(Records(payloads=(encode_record(request_record()),) * 100))
    front.socket.close()
    await harness.receiver.close(TEST_TIMEOUT_S)
    assert len(harness.recorded.records) == 100


async def test_a_listener_that_raises_does_not_affect_the_others() -> None:
    class Trips(RecordingListener):
        def add_records(self, records: Sequence[RequestRecord]) -> None:
            raise RuntimeError("a bug")

    recorded = RecordingListener()
    fanout = ServiceListeners(Trips(), recorded)
    fanout.add_records([request_record()])
    fanout.add_heartbeat(heartbeat(1))
    assert len(recorded.records) == len(recorded.heartbeats) == 1
    assert fanout.num_failures == 1


def test_steps_are_read_and_an_unreadable_recorder_does_not_stop_the_receiver() -> None:
    recorded, engine = RecordingListener(), RecordedEngine()
    source = FlightSource(engine.fd, recorded)
    engine.submit(1, 20, 5)
    engine.step()
    engine.step()
    source.read()
    source.read()  # nothing new: no event
    next_generation = (4).to_bytes(8, "little")
    os.pwrite(engine.fd, b"?", FACTS_OFFSET)
    os.pwrite(engine.fd, next_generation, GENERATION_OFFSET)
    source.read()
    FlightWriter(engine.fd, make_facts(epoch=7))
    source.read()
    assert recorded.steps == [(1, 2, 0)]
    assert recorded.totals["num_output_tokens"] == 2
