"""To which process each operator call is sent, and what happens if that process does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.scheduler.output_view import OutputView
from penstock.server.ipc.control_frames import Drain, FromChild, SetLogLevel
from penstock.server.ipc.frames import Action, Command, CommandResult, Profile
from penstock.server.ipc.ports import EngineUnavailable
from penstock.server.observe.frames import FrontRequestView
from penstock.server.observe.front_receiver import FrontUnavailable
from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import OperationsError, RequestView, Snapshot

SNAPSHOT = Snapshot(time_s=0.0, uptime_s=1.0, is_draining=False, models=(), fronts=())
SentCommand = tuple[str, Action]


class Fakes:
    """Stands for all other processes of a service, and records the commands sent to them."""

    def __init__(self) -> None:
        self.front_ids: tuple[int, ...] = (1, 2)
        self.num_live = 3
        self.commands: list[SentCommand] = []
        self.messages: list[FromChild] = []
        self.engine_problem: EngineUnavailable | None = None
        self.problem = ""
        self.is_complete = True
        self.num_queries = 0
        self.has_begun_drain = False
        self.answering = asyncio.Event()
        self.answering.set()

    def snapshot(self) -> Snapshot:
        return SNAPSHOT

    def begin_drain(self) -> None:
        self.has_begun_drain = True

    async def request_views(self, limit_s: float) -> tuple[tuple[FrontRequestView, ...], bool]:
        await self.answering.wait()
        return (), self.is_complete

    async def output_views(self, limit_s: float) -> tuple[OutputView, ...]:
        self.num_queries += 1
        await self.answering.wait()
        if self.engine_problem is not None:
            raise self.engine_problem
        return ()

    def merge(
        self, outputs: tuple[OutputView, ...], requests: tuple[FrontRequestView, ...]
    ) -> tuple[RequestView, ...]:
        return ()

    def send(self, name: str, action: Action) -> CommandResult:
        self.commands.append((name, action))
        return CommandResult(ticket=0, problem=self.problem, payload=b"p" * 150_000)

    async def command(self, action: Action, limit_s: float) -> CommandResult:
        if self.engine_problem is not None:
            raise self.engine_problem
        return self.send("engine", action)

    def execute(self, command: Command, answer: Callable[[CommandResult], None]) -> None:
        answer(self.send("observer", command.action))

    def send_to_supervisor(self, frame: FromChild) -> None:
        self.messages.append(frame)

    def copy(self) -> bytes:
        raise ValueError("holds nothing yet")

    def dump(self, why: str) -> Path:
        return Path("/flights") / why


class FakeFronts:
    """Stands for the fronts; its `command` also takes the front's id."""

    def __init__(self, fakes: Fakes) -> None:
        self.fakes = fakes
        self.request_views = fakes.request_views

    @property
    def front_ids(self) -> tuple[int, ...]:
        return self.fakes.front_ids

    @property
    def num_live(self) -> int:
        return self.fakes.num_live

    async def command(self, front_id: int, action: Action, limit_s: float) -> CommandResult:
        if front_id == 2 and self.fakes.problem == "gone":
            raise FrontUnavailable("front 2 is gone")
        return self.fakes.send(f"front {front_id}", action)


def operations_of(fakes: Fakes, *, has_recorder: bool = True) -> Operations:
    others: Any = fakes
    fronts: Any = FakeFronts(fakes)
    return Operations(
        snapshots=others,
        fronts=fronts,
        engine=others,
        flight=others if has_recorder else None,
        merge=fakes.merge,
        execute=fakes.execute,
        send_to_supervisor=fakes.send_to_supervisor,
    )


async def test_concurrent_queries_of_live_requests_share_one_query_of_the_processes() -> None:
    fakes = Fakes()
    under_test = operations_of(fakes)
    fakes.answering.clear()
    looks = [asyncio.create_task(under_test.live_requests()) for _ in range(10)]
    await asyncio.sleep(0)
    looks[0].cancel()
    fakes.answering.set()
    assert await asyncio.gather(*looks[1:]) == [()] * 9
    await under_test.live_requests()
    assert fakes.num_queries == 1


async def test_without_an_engine_the_fronts_are_shown_and_without_any_that_is_reported() -> None:
    fakes = Fakes()
    fakes.engine_problem = EngineUnavailable("the engine is down")
    assert await operations_of(fakes).live_requests() == ()
    fakes.is_complete = False
    with pytest.raises(OperationsError, match="no process responds: the engine is down"):
        await operations_of(fakes).live_requests()


async def test_a_drain_with_a_valid_timeout_is_requested_from_the_supervisor() -> None:
    fakes = Fakes()
    assert await operations_of(fakes).drain(2.5) == 3
    assert fakes.messages == [Drain(timeout_s=2.5)]
    assert fakes.has_begun_drain
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(OperationsError, match="timeout must be 0 or more seconds"):
            await operations_of(fakes).drain(bad)
    assert len(fakes.messages) == 1


async def test_a_log_level_goes_to_every_process() -> None:
    fakes = Fakes()
    await operations_of(fakes).set_log_level("debug")
    assert {name for name, _ in fakes.commands} == {"observer", "engine", "front 1", "front 2"}
    assert {action for _, action in fakes.commands} == {SetLogLevel(level="debug")}
    assert fakes.messages == [SetLogLevel(level="debug")]
    with pytest.raises(OperationsError, match="level must be one of debug, info, warning, error"):
        await operations_of(fakes).set_log_level("loud")


async def test_a_process_that_did_not_receive_a_log_level_is_named() -> None:
    fakes = Fakes()
    fakes.engine_problem = EngineUnavailable("the engine is down")
    with pytest.raises(
        OperationsError, match=r"some processes failed: engine: the engine is down$"
    ):
        await operations_of(fakes).set_log_level("debug")


@pytest.mark.parametrize("process", ["engine", "observer", "front 2"])
async def test_a_profile_is_returned_in_pieces_by_the_process_asked(process: str) -> None:
    fakes = Fakes()
    pieces = [piece async for piece in operations_of(fakes).profile(process, 3.0)]
    assert len(pieces) > 1
    assert b"".join(pieces) == b"p" * 150_000
    assert fakes.commands == [(process, Profile(seconds=3.0))]


@pytest.mark.parametrize(
    ("process", "why"),
    [
        ("kernel", "process must be engine, observer or front N, not 'kernel'"),
        ("front ²", "process must be"),
        ("front 3", "there is no front 3; there are 1, 2"),
    ],
)
async def test_a_profile_of_an_unknown_process_is_rejected(process: str, why: str) -> None:
    with pytest.raises(OperationsError, match=why):
        async for _ in operations_of(Fakes()).profile(process, 1.0):
            pass


async def test_a_profile_that_cannot_be_made_states_why() -> None:
    fakes = Fakes()
    fakes.problem = "engine is being sampled already"
    with pytest.raises(OperationsError, match="engine is being sampled already"):
        async for _ in operations_of(fakes).profile("engine", 1.0):
            pass
    fakes.problem = "gone"
    with pytest.raises(OperationsError, match="front 2 is gone"):
        async for _ in operations_of(fakes).profile("front 2", 1.0):
            pass


async def test_the_flight_record_and_its_absence() -> None:
    fakes = Fakes()
    assert await operations_of(fakes).dump_flight_record("requested") == Path("/flights/requested")
    with pytest.raises(OperationsError, match="there is no flight record: holds nothing yet"):
        await operations_of(fakes).flight_record()
    with pytest.raises(OperationsError, match="there is no flight recorder"):
        await operations_of(fakes, has_recorder=False).flight_record()
    with pytest.raises(OperationsError, match="there is no flight recorder"):
        await operations_of(fakes, has_recorder=False).dump_flight_record("requested")


async def test_a_slow_disk_blocks_no_caller_and_takes_one_dump_at_a_time() -> None:
    fakes = Fakes()
    began, may_end = threading.Event(), threading.Event()
    paths: list[str] = []

    def dump(why: str) -> Path:
        paths.append(why)
        began.set()
        assert may_end.wait(60)
        return Path("/flights") / why

    fakes.dump = dump  # type: ignore[method-assign]
    under_test = operations_of(fakes)
    first = asyncio.ensure_future(under_test.dump_flight_record("first"))
    second = asyncio.ensure_future(under_test.dump_flight_record("second"))
    assert await asyncio.to_thread(began.wait, 20.0)
    assert await under_test.live_requests() == ()
    assert paths == ["first"]
    may_end.set()
    assert await first == Path("/flights/first")
    assert await second == Path("/flights/second")
