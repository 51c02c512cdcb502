"""Runs the supervisor: starts engine, fronts (gRPC server processes) and observer, restarts them,
and shuts them down in order.

Owns the port, the engine's listening socket, the shared memories and the signal handlers, and
checks for hangs. The supervisor handles no requests and imports neither torch nor grpc, to minimise
the risk of a crash.
"""

import asyncio
import dataclasses
import itertools
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.server.config import ServerConfig
from penstock.server.ipc.board import create_board, create_heartbeats
from penstock.server.ipc.control_frames import Drain, FromChild, SetLogLevel
from penstock.server.observe.logs import IN_BANNER, LOG_LEVELS, set_log_level
from penstock.server.processes.child import ChildFailed
from penstock.server.processes.engine_supervision import EngineSupervision, FlightMemory
from penstock.server.processes.exit_codes import (
    EXIT_GAVE_UP,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
)
from penstock.server.processes.front_supervision import NUM_ROWS, FrontSupervision
from penstock.server.processes.hang_watch import NUM_CHECKS
from penstock.server.processes.observer_supervision import ObserverSupervision
from penstock.server.processes.orphans import LIMIT_S, Orphans
from penstock.server.processes.rolling import RollingRestart
from penstock.server.processes.service_processes import ServiceProcesses, drain_in_order
from penstock.server.processes.service_sockets import (
    SOCKET_NAME,
    PortUnavailable,
    create_folder,
    listen,
    reserve_port,
)
from penstock.server.processes.spawn_context import SpawnContext
from penstock.server.processes.supervised_process import CrashLoop, SupervisedProcess

logger = logging.getLogger(__name__)

_KILL_S = 5.0 + LIMIT_S
_ENGINE_BACKLOG = 64


class CannotStart(Exception):
    """The service did not start. The message is for the operator."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReady:
    """Describes the started service: its model, its processes, and its addresses.
    `operations_address` and `metrics_url` are None if they are not served.

    `start_s` is the duration of the start, in seconds. `resources` is the executor's report of its
    resources, empty if there is none.
    """

    address: str
    model: str
    executor: str
    num_fronts: int
    start_s: float
    resources: str
    has_tls: bool
    operations_address: str | None
    metrics_url: str | None


class Supervisor:
    """Runs one service. `announce` is called once, when the service is ready."""

    def __init__(self, config: ServerConfig, announce: Callable[[ServiceReady], None]) -> None:
        self._config = config
        self._announce = announce
        self._started_s = time.monotonic()
        self._port = 0
        self._socket_path = Path()
        self._engine_listener: socket.socket | None = None
        self._board_fd = -1
        self._heartbeats_fd = -1
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._forced_by = 0
        self._is_ready = False
        self._orphans = Orphans()
        self._requested_drain_timeout_s: float | None = None
        self._flight = FlightMemory(config.observer.flight)
        self._dumps: set[asyncio.Task[None]] = set()
        self._rolling_restart: asyncio.Task[None] | None = None
        self._processes = ServiceProcesses()
        self._engine = EngineSupervision(
            self._spawn_context, orphans=self._orphans, flight=self._flight
        )
        front_ids = itertools.count(1)
        self._fronts = [
            FrontSupervision(
                number, self._spawn_context, orphans=self._orphans, front_ids=front_ids
            )
            for number in range(1, config.num_fronts + 1)
        ]
        self._observer: ObserverSupervision | None = None
        if config.observer.is_needed:
            self._observer = ObserverSupervision(
                config.observer,
                spawn_context=self._spawn_context,
                start=self._orphans.start,
                on_message=self._on_observer_message,
            )

    async def run(self) -> int:
        """Serve until a stop is requested, or until the engine or a front has crashed too often.
        Return the exit code. Raises CannotStart if a process fails before the service is ready."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._on_dump_signal)
        loop.add_signal_handler(signal.SIGUSR2, self._on_restart_signal)
        self._orphans.adopt()
        with ExitStack() as stack:
            self._open_sockets(stack)
            self._open_memories(stack)
            logger.info(
                "starting: model=%s port=%d socket=%s",
                self._config.model,
                self._port,
                self._socket_path,
                extra=IN_BANNER,
            )
            # Start the engine first, because it takes longest.
            for process in (self._engine.process, *(place.process for place in self._fronts)):
                self._processes.add(process)
            observers: dict[SupervisedProcess, asyncio.Task[int]] = {}
            if self._observer is not None:
                task = asyncio.create_task(self._observer.keep_alive(), name="observer")
                observers[self._observer.process] = task
            checks = [
                asyncio.create_task(_poll(limit_s, check))
                for limit_s, check in (
                    (self._config.engine_hang_s, self._engine.check),
                    (self._config.front_hang_s, self._check_fronts),
                )
                if limit_s
            ]
            try:
                return await self._serve(observers)
            finally:
                for check in checks:
                    check.cancel()
                await self._kill_all(observers)

    async def _kill_all(self, observers: dict[SupervisedProcess, asyncio.Task[int]]) -> None:
        """Kill all processes that are alive, and the orphans that they leave behind."""
        self._abort_rolling_restart()
        for process in (*self._processes.all, *observers):
            process.kill()
        tasks = (*self._processes.tasks, *observers.values())
        await asyncio.wait(tasks, timeout=_KILL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._dumps, return_exceptions=True)
        await self._orphans.end_all("the service")

    async def _serve(self, observers: dict[SupervisedProcess, asyncio.Task[int]]) -> int:
        processes, observed = self._processes, observers.values()
        await self._until_stop(self._all_ready(observers), *map(_end_of, observed))
        if any(task.done() and task.exception() is None for task in observed):
            # It crashed repeatedly while other processes were starting.
            await self._until_stop(processes.all_ready())
        try:
            processes.raise_first()
            for task in observed:
                if task.done():
                    task.result()
        except (ChildFailed, CrashLoop) as failure:
            raise CannotStart(str(failure)) from failure
        if self._stop.is_set():
            return EXIT_OK
        self._announce_ready()
        # The observer may end, because the service continues without it.
        await self._until_stop()
        self._abort_rolling_restart()
        try:
            processes.raise_first()
        except CrashLoop as failure:
            logger.critical("giving up: %s", failure)
            self._stop.set()  # From here on a signal is the second request to stop.
            await self._drain(observers)
            return EXIT_GAVE_UP
        return await self._drain(observers)

    async def _all_ready(self, observers: dict[SupervisedProcess, asyncio.Task[int]]) -> None:
        await self._processes.all_ready()
        for process in observers:
            await process.is_ready.wait()

    async def _until_stop(self, *events: Coroutine[Any, Any, object]) -> None:
        """Wait until a stop is requested, a required process is lost, or one of `events` is
        done."""
        always = (self._stop.wait(), self._processes.any_lost())
        waits = [asyncio.create_task(event) for event in (*always, *events)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _drain(self, observers: dict[SupervisedProcess, asyncio.Task[int]]) -> int:
        """Drain the fronts, then end the engine, then the observer; return the exit code. A second
        signal interrupts this."""
        processes = self._processes
        gone = {
            process for process in processes.all if processes.task_of(process).done()
        }  # These have ended already.
        order = asyncio.create_task(
            drain_in_order(
                processes,
                self._engine.process,
                observers,
                drain_timeout_s=self._current_drain_timeout_s,
                engine_exit_s=self._config.executor.max_exit_s,
            )
        )
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({order, forced}, return_when=asyncio.FIRST_COMPLETED)
        order.cancel()
        forced.cancel()
        if self._forced.is_set():
            return EXIT_SIGNAL_BASE + self._forced_by
        bad = [
            process.name
            for process in processes.all
            if process not in gone and processes.failed_to_stop(process)
        ]
        if bad:
            logger.error("did not shut down cleanly: %s", ", ".join(bad))
        return EXIT_GAVE_UP if bad else EXIT_OK

    @property
    def _current_drain_timeout_s(self) -> float:
        requested_s = self._requested_drain_timeout_s
        return self._config.drain_timeout_s if requested_s is None else requested_s

    def _check_fronts(self, limit_s: float) -> None:
        for front in self._fronts:
            front.check(limit_s)

    def _open_sockets(self, stack: ExitStack) -> None:
        try:
            host, port = self._config.host, self._config.port
            reserved = stack.enter_context(
                reserve_port(host, port, flag="--port", host_flag="--host")
            )
            self._port = reserved.getsockname()[1]
            folder = create_folder(stack)
            self._socket_path = folder / SOCKET_NAME
            self._engine_listener = listen(stack, self._socket_path, _ENGINE_BACKLOG)
            if self._observer is not None:
                self._observer.open(folder, stack)
        except PortUnavailable as error:
            raise CannotStart(str(error)) from error

    def _open_memories(self, stack: ExitStack) -> None:
        self._flight.create(self._port)
        stack.callback(self._flight.close)
        try:
            self._board_fd = create_board(self._config.executor.max_num_seqs)
            stack.callback(os.close, self._board_fd)
            self._heartbeats_fd = create_heartbeats(NUM_ROWS)
            stack.callback(os.close, self._heartbeats_fd)
        except OSError as error:
            raise CannotStart(f"cannot allocate shared memory: {error}") from error

    def _spawn_context(self) -> SpawnContext:
        assert self._engine_listener is not None
        return SpawnContext(
            # With the actual port.
            config=dataclasses.replace(self._config, port=self._port),
            socket_path=self._socket_path,
            listener_fd=self._engine_listener.fileno(),
            observer_path=None if self._observer is None else self._observer.socket_path,
            flight_fd=self._flight.fd,
            board_fd=self._board_fd,
            heartbeats_fd=self._heartbeats_fd,
            started_s=self._started_s,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning("%s again: stopping now", number.name)
            self._forced_by = number
            self._forced.set()
        else:
            logger.info("%s: draining, at most %g s", number.name, self._config.drain_timeout_s)
            self._stop.set()

    def _on_dump_signal(self) -> None:
        dump = asyncio.get_running_loop().create_task(self._flight.dump("requested"))
        self._dumps.add(dump)
        dump.add_done_callback(self._dumps.discard)

    def _on_restart_signal(self) -> None:
        if self._stop.is_set() or not self._is_ready:
            logger.warning("SIGUSR2 ignored: the service is not ready yet")
        elif self._rolling_restart is not None and not self._rolling_restart.done():
            logger.warning("SIGUSR2: a rolling restart is under way already")
        else:
            restart = RollingRestart(
                self._processes,
                self._engine,
                self._fronts,
                drain_timeout_s=lambda: self._current_drain_timeout_s,
                can_replay=self._config.front.max_replays > 0,
            )
            self._rolling_restart = asyncio.get_running_loop().create_task(
                restart.run(), name="rolling restart"
            )

    def _abort_rolling_restart(self) -> None:
        if self._rolling_restart is not None:
            self._rolling_restart.cancel()

    def _on_observer_message(self, frame: FromChild) -> None:
        """Execute an operator's command that the observer passes on: drain the service, or set the
        log level of this process and of the processes that it starts later."""
        match frame:
            case Drain(timeout_s=timeout_s):
                self._on_drain_command(timeout_s)
            case SetLogLevel(level=level) if level in LOG_LEVELS:
                logger.info("log level %s, by an operator", level)
                set_log_level(level)
                # For processes that start from now on.
                self._config = dataclasses.replace(self._config, log_level=level)
            case _:
                logger.error("unexpected message of the observer: %.100s", frame)

    def _on_drain_command(self, timeout_s: float | None) -> None:
        if self._stop.is_set():
            return  # The service already drains, within the time of the first request.
        if timeout_s is not None and timeout_s >= 0 and math.isfinite(timeout_s):
            self._requested_drain_timeout_s = timeout_s
        logger.info("an operator: draining, at most %g s", self._current_drain_timeout_s)
        self._stop.set()

    def _announce_ready(self) -> None:
        self._is_ready = True
        config, observer = self._config, self._observer
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._announce(
            ServiceReady(
                address=f"{host}:{self._port}",
                model=config.model,
                executor=config.executor.kind.value,
                num_fronts=config.num_fronts,
                start_s=time.monotonic() - self._started_s,
                resources=self._engine.process.facts.get("resources", ""),
                has_tls=config.security.has_tls,
                operations_address=None if observer is None else observer.operations_address,
                metrics_url=None if observer is None else observer.metrics_url,
            )
        )


async def _end_of(task: "asyncio.Task[int]") -> None:
    await asyncio.wait([task])


async def _poll(limit_s: float, check: Callable[[float], None]) -> None:
    while True:
        await asyncio.sleep(limit_s / NUM_CHECKS)
        check(limit_s)
