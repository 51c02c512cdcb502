"""Implements the operations of `penstock.v1.OperationsService` in the observer process, without
gRPC.

Queries other processes, with time limits. If the engine or a front (gRPC server process) does not
respond in time, the list of live requests does not contain its data.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from penstock.scheduler.output_view import OutputView
from penstock.server.ipc.control_frames import Drain, FromChild, SetLogLevel
from penstock.server.ipc.frames import Action, Command, CommandResult, Profile
from penstock.server.ipc.ports import EngineUnavailable
from penstock.server.observe.engine_client import EngineClient
from penstock.server.observe.flight_source import FlightSource
from penstock.server.observe.frames import FrontRequestView
from penstock.server.observe.front_receiver import FrontReceiver, FrontUnavailable
from penstock.server.observe.logs import LOG_LEVELS
from penstock.server.observe.operations.snapshot import OperationsError, RequestView, Snapshot
from penstock.server.observe.operations.snapshots import SnapshotMaker

_LIVE_VIEWS_S = 1.0
_COMMAND_S = 2.0
_AFTER_PROFILE_S = 5.0
"""Time limit for a sampled process to aggregate its samples, in seconds."""
_FRESH_S = 0.25
"""How long a response is cached, in seconds. The rate of queries is independent of the number of
viewers."""
_CHUNK_BYTES = 64 * 1024

_T = TypeVar("_T")
Merge = Callable[[tuple[OutputView, ...], tuple[FrontRequestView, ...]], tuple[RequestView, ...]]


class Operations:
    """Returns the state of the service, its live requests, flight records and profiles, and
    executes the commands to drain it and to set the log level. Runs on the observer's event loop.

    `send_to_supervisor` sends a message to the supervisor. `execute` executes commands in this
    process. `merge` combines the views that the engine and the fronts have of the live requests.
    `flight` is None without a flight recorder.
    """

    def __init__(
        self,
        *,
        snapshots: SnapshotMaker,
        fronts: FrontReceiver,
        engine: EngineClient,
        flight: FlightSource | None,
        merge: Merge,
        execute: Callable[[Command, Callable[[CommandResult], None]], None],
        send_to_supervisor: Callable[[FromChild], None],
    ) -> None:
        self._snapshots = snapshots
        self._fronts = fronts
        self._engine = engine
        self._flight = flight
        self._merge = merge
        self._execute = execute
        self._send_to_supervisor = send_to_supervisor
        self._querying: asyncio.Task[tuple[RequestView, ...]] | None = None
        self._queried_s = -math.inf
        self._reading_flight = asyncio.Lock()

    def snapshot(self) -> Snapshot:
        """Return the current state of the service, without querying other processes."""
        return self._snapshots.snapshot()

    async def live_requests(self) -> tuple[RequestView, ...]:
        """Query engine and fronts; return all live requests in order of arrival. Concurrent calls,
        and calls within `_FRESH_S`, share a query.

        Raises OperationsError if the engine is unavailable, at least one front does not respond,
        and no other front has live requests.
        """
        loop = asyncio.get_running_loop()
        is_old = loop.time() - self._queried_s > _FRESH_S
        if self._querying is None or (self._querying.done() and is_old):
            self._queried_s = loop.time()
            self._querying = loop.create_task(self._query_live_views())
        # The cancellation of one caller must not cancel the shared query.
        return await asyncio.shield(self._querying)

    async def drain(self, timeout_s: float | None) -> int:
        """Send a drain command to the supervisor; return the number of live requests.

        If `timeout_s` is None, the configured drain timeout applies. Raises OperationsError unless
        `timeout_s` is finite and not negative.
        """
        if timeout_s is not None and not (timeout_s >= 0 and math.isfinite(timeout_s)):
            raise OperationsError(f"timeout must be 0 or more seconds, not {timeout_s:g}")
        num_live = self._fronts.num_live
        self._send_to_supervisor(Drain(timeout_s=timeout_s))
        self._snapshots.begin_drain()
        return num_live

    async def flight_record(self) -> bytes:
        """Return a copy of the flight recorder's memory in the file format.

        Raises OperationsError if there is no flight recorder or no record.
        """
        recorder = self._recorder()
        try:
            return await self._in_thread(recorder.copy)
        except (OSError, ValueError) as error:
            raise OperationsError(f"there is no flight record: {error}") from error

    async def dump_flight_record(self, why: str) -> Path:
        """Write the flight record to the flight folder and return the path.

        Raises OperationsError if there is no flight recorder or no record, or if the file cannot be
        written.
        """
        recorder = self._recorder()
        try:
            # A slow disk must not delay other calls.
            return await self._in_thread(lambda: recorder.dump(why))
        except (OSError, ValueError) as error:
            raise OperationsError(f"the flight record cannot be written: {error}") from error

    async def set_log_level(self, level: str) -> None:
        """Set the log level of all processes.

        Raises OperationsError if the level is invalid, or if processes failed; the message names
        the level or these processes.
        """
        if level not in LOG_LEVELS:
            raise OperationsError(f"level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
        # The supervisor keeps the level for processes that start later.
        action = SetLogLevel(level=level)
        self._send_to_supervisor(action)
        names = ["observer", "engine", *(f"front {number}" for number in self._fronts.front_ids)]
        answers = await asyncio.gather(
            *(self._command(name, action, _COMMAND_S) for name in names),
            return_exceptions=True,
        )
        problems = [
            f"{name}: {problem}"
            for name, answer in zip(names, answers, strict=True)
            if (problem := _problem_of(answer))
        ]
        if problems:
            raise OperationsError(f"some processes failed: {'; '.join(problems)}")

    async def profile(self, process: str, seconds: float) -> AsyncIterator[bytes]:
        """Sample a process for `seconds` seconds, and yield chunks of the profile, a speedscope
        file. `process` is `engine`, `front N` or `observer`.

        Raises OperationsError for an invalid process, and if the process fails, rejects the
        duration or does not respond.
        """
        limit_s = seconds + _AFTER_PROFILE_S
        try:
            answer = await self._command(process, Profile(seconds=seconds), limit_s)
        except (EngineUnavailable, FrontUnavailable) as error:
            raise OperationsError(str(error)) from error
        if answer.problem:
            raise OperationsError(answer.problem)
        for start in range(0, len(answer.payload), _CHUNK_BYTES):
            yield answer.payload[start : start + _CHUNK_BYTES]

    def _recorder(self) -> FlightSource:
        if self._flight is None:
            raise OperationsError("there is no flight recorder")
        return self._flight

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work` on a thread and return its result. `work` uses the flight recorder. Only one
        call runs at a time. The work continues even if the caller is cancelled."""
        await self._reading_flight.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        working.add_done_callback(lambda _: self._reading_flight.release())
        return await asyncio.shield(working)

    async def _query_live_views(self) -> tuple[RequestView, ...]:
        engine, fronts = await asyncio.gather(
            self._engine.output_views(_LIVE_VIEWS_S),
            self._fronts.request_views(_LIVE_VIEWS_S),
            return_exceptions=True,
        )
        if isinstance(fronts, BaseException):
            raise fronts
        views, is_complete = fronts
        if isinstance(engine, EngineUnavailable):
            if not views and not is_complete:
                raise OperationsError(f"no process responds: {engine}")
            engine = ()  # The views of the fronts are returned nevertheless.
        if isinstance(engine, BaseException):
            raise engine
        return self._merge(engine, views)

    async def _command(self, process: str, action: Action, limit_s: float) -> CommandResult:
        """Send a command to a process by name and return its result.

        Raises OperationsError for an unknown name. If the process does not respond, raises
        EngineUnavailable for the engine, FrontUnavailable for a front, and OperationsError for the
        observer.
        """
        if process == "engine":
            return await self._engine.command(action, limit_s)
        if process == "observer":
            return await self._command_here(action, limit_s)
        role, _, number = process.partition(" ")
        if role != "front" or not (number.isascii() and number.isdecimal()):
            raise OperationsError(f"process must be engine, observer or front N, not {process!r}")
        if int(number) not in self._fronts.front_ids:
            there = ", ".join(map(str, self._fronts.front_ids)) or "none"
            raise OperationsError(f"there is no front {int(number)}; there are {there}")
        return await self._fronts.command(int(number), action, limit_s)

    async def _command_here(self, action: Action, limit_s: float) -> CommandResult:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[CommandResult] = loop.create_future()

        def settle(done: CommandResult) -> None:
            if not answer.done():
                answer.set_result(done)

        def answer_from_any_thread(done: CommandResult) -> None:
            loop.call_soon_threadsafe(settle, done)

        self._execute(Command(ticket=0, action=action), answer_from_any_thread)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise OperationsError("the observer did not respond in time") from None


def _problem_of(answer: CommandResult | BaseException) -> str:
    if isinstance(answer, CommandResult):
        return answer.problem
    if isinstance(answer, EngineUnavailable | FrontUnavailable | OperationsError):
        return str(answer)
    raise answer
