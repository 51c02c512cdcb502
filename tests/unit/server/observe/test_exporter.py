"""A front's connection to the observer over a real socket: how reports are sent in batches, what is
dropped if limits are reached or the observer is lost, and how commands are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path

import pytest

from penstock.server.ipc.control_frames import SetLogLevel
from penstock.server.ipc.frames import Command, CommandResult
from penstock.server.observe.exporter import FULL, NO_OBSERVER, Exporter
from penstock.server.observe.frames import (
    FrontRequestView,
    Hello,
    LiveAnswer,
    LiveQuery,
    Records,
)
from support.observer_connection import ObserverConnection
from support.reports import front_request_view, heartbeat
from support.timeout import TEST_TIMEOUT_S

HELLO = Hello(front_id=3, pid=42)
HEARTBEATS = [heartbeat(3, num_records=number) for number in (1, 2)]


class FakeObserver:
    """Listens on a socket as the observer does. The test reads from the accepted connections."""

    def __init__(self, path: Path) -> None:
        self.peers: list[Peer] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.setblocking(False)

    async def accept(self) -> Peer:
        loop = asyncio.get_running_loop()
        accepted, _ = await asyncio.wait_for(loop.sock_accept(self.listener), TEST_TIMEOUT_S)
        self.peers.append(Peer(accepted))
        return self.peers[-1]

    async def greeted(self) -> Peer:
        """Accept a connection of the front, read its Hello frame, and return the observer's end."""
        peer = await self.accept()
        assert await peer.next() == HELLO
        return peer

    def close(self) -> None:
        self.listener.close()
        for peer in self.peers:
            peer.socket.close()


class Peer(ObserverConnection):
    """The observer's end of one connection of the front."""

    async def records(self, num: int) -> list[bytes]:
        payloads: list[bytes] = []
        while len(payloads) < num:
            frame = await self.next()
            assert isinstance(frame, Records)
            payloads += frame.payloads
        return payloads


def execute(command: Command, answer: object) -> None:
    assert callable(answer)
    assert isinstance(command.action, SetLogLevel)
    answer(CommandResult(ticket=command.ticket, payload=command.action.level.encode()))


@contextlib.asynccontextmanager
async def exporter(
    path: Path, *, num_live: int = 0, max_bytes: int = 1 << 22, max_records: int = 20_000
) -> AsyncGenerator[Exporter]:
    made = Exporter(
        path,
        HELLO,
        request_views=lambda: tuple(front_request_view([number]) for number in range(num_live)),
        execute=execute,
        max_bytes=max_bytes,
        max_records=max_records,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close(0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "observer.sock"


@pytest.fixture
def observer(path: Path) -> Generator[FakeObserver]:
    made = FakeObserver(path)
    yield made
    made.close()


async def test_records_arrive_in_order_and_together(path: Path, observer: FakeObserver) -> None:
    async with exporter(path) as box:
        peer = await observer.greeted()
        sent = [b"record %d" % number for number in range(100)]
        for payload in sent:
            box.offer(payload)
        frame = await peer.next()
        assert frame == Records(payloads=tuple(sent)), "one frame, though nobody asked to flush"
        assert box.dropped == {FULL: 0, NO_OBSERVER: 0}


async def test_records_sent_before_the_observer_starts_are_delivered(
    path: Path, observer: FakeObserver
) -> None:
    async with exporter(path) as box:
        box.offer(b"early")
        box.send_heartbeat(HEARTBEATS[0])
        box.send_heartbeat(HEARTBEATS[1])
        peer = await observer.greeted()
        assert await peer.next() == HEARTBEATS[1], "of two states the newest"
        assert await peer.records(1) == [b"early"]


async def test_records_for_an_observer_that_does_not_read_are_dropped_and_counted(
    path: Path, observer: FakeObserver
) -> None:
    payload = b"x" * 1000
    async with exporter(path, max_bytes=100_000) as box:
        peer = await observer.greeted()
        # The kernel's buffer fills first, then ours; then the rest is dropped at once.
        for _ in range(5_000):
            box.offer(payload)
            await asyncio.sleep(0)
        num_taken = 5_000 - box.dropped[FULL]
        assert 0 < num_taken < 5_000
        assert box.dropped[NO_OBSERVER] == 0
        assert await peer.records(num_taken) == [payload] * num_taken, "nothing else is lost"
        box.offer(b"again")
        assert await peer.records(1) == [b"again"]


async def test_the_number_of_records_is_bounded_too(path: Path, observer: FakeObserver) -> None:
    box = Exporter(path, HELLO, request_views=lambda: (), execute=execute, max_records=3)
    for num_dropped in (0, 0, 0, 1, 2):
        box.offer(b"")
        assert box.dropped[FULL] == num_dropped
    await box.close(0.0)


async def test_records_without_a_receiver_are_dropped_and_counted(
    path: Path, observer: FakeObserver
) -> None:
    # Not full before the next attempt to connect.
    async with exporter(path, max_records=1 << 20) as box:
        peer = await observer.greeted()
        # Given up: nothing listens any more.
        observer.listener.close()
        peer.socket.close()
        num_offered = 0
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while not box.dropped[NO_OBSERVER]:
                box.offer(b"lost")
                num_offered += 1
                await asyncio.sleep(0)
        assert box.dropped == {FULL: 0, NO_OBSERVER: num_offered}


async def test_the_next_observer_is_found_and_what_waited_is_kept_for_it(
    path: Path, observer: FakeObserver
) -> None:
    async with exporter(path) as box:
        first = await observer.greeted()
        first.socket.close()  # killed; its listening socket lives on elsewhere
        second = await observer.accept()
        box.offer(b"for the next")
        assert await second.next() == HELLO
        assert await second.records(1) == [b"for the next"]
        assert box.dropped[NO_OBSERVER] == 0


async def test_live_requests_come_in_parts_that_end(path: Path, observer: FakeObserver) -> None:
    async with exporter(path, num_live=300):
        peer = await observer.greeted()
        peer.send(LiveQuery(ticket=7))
        views: list[FrontRequestView] = []
        is_last = False
        while not is_last:
            part = await peer.next()
            assert isinstance(part, LiveAnswer)
            assert part.ticket == 7
            views += part.views
            is_last = part.is_last
        assert views == [front_request_view([number]) for number in range(300)]


async def test_orders_are_carried_out_and_answered(path: Path, observer: FakeObserver) -> None:
    async with exporter(path):
        peer = await observer.greeted()
        peer.send(Command(ticket=9, action=SetLogLevel(level="debug")))
        assert await peer.next() == CommandResult(ticket=9, payload=b"debug")


async def test_an_observer_that_breaks_the_protocol_is_disconnected(
    path: Path, observer: FakeObserver
) -> None:
    async with exporter(path):
        peer = await observer.greeted()
        peer.send(HELLO)
        await observer.greeted()


async def test_the_final_messages_are_sent_before_it_disconnects(
    path: Path, observer: FakeObserver
) -> None:
    async with exporter(path) as box:
        peer = await observer.accept()
        box.offer(b"last")
        box.send_heartbeat(HEARTBEATS[0])
        await box.close(TEST_TIMEOUT_S)
    assert await peer.next() == HELLO
    assert await peer.next() == HEARTBEATS[0]
    assert await peer.records(1) == [b"last"]
    assert box.dropped[NO_OBSERVER] == 0
    box.offer(b"too late")
    assert box.dropped[NO_OBSERVER] == 1


async def test_closing_waits_no_longer_than_its_limit_for_a_blocked_reader(
    path: Path, observer: FakeObserver
) -> None:
    async with exporter(path) as box:
        peer = await observer.accept()
        for _ in range(30):
            box.offer(b"x" * 100_000)
        assert box.dropped == {FULL: 0, NO_OBSERVER: 0}
        await box.close(0.01)
    num_lost = box.dropped[NO_OBSERVER]
    assert 0 < num_lost <= 30
    # A record that was being sent is incomplete; none of those counted as lost arrived completely.
    whole: list[bytes] = []
    with contextlib.suppress(AssertionError):
        assert await peer.next() == HELLO
        while True:
            whole += await peer.records(1)
    assert len(whole) == 30 - num_lost


async def test_thousands_of_live_requests_do_not_block_the_event_loop(
    path: Path, observer: FakeObserver
) -> None:
    made: list[int] = []

    def request_views() -> Iterator[FrontRequestView]:
        for number in range(3000):
            made.append(number)
            yield front_request_view([number])

    loop = asyncio.get_running_loop()
    grown: list[int] = []

    def tick(num_before: int) -> None:
        grown.append(len(made) - num_before)
        if len(made) < 3000:
            loop.call_soon(tick, len(made))

    box = Exporter(path, HELLO, request_views=request_views, execute=execute)
    await box.start()
    peer = await observer.greeted()
    tick(0)
    peer.send(LiveQuery(ticket=1))
    num_reported = 0
    while num_reported < 3000:
        part = await peer.next()
        assert isinstance(part, LiveAnswer)
        num_reported += len(part.views)
    await box.close(0.0)
    assert sum(grown) == 3000
    assert max(grown) <= 128
