"""The supervisor: starts engine, fronts and observer, keeps them alive, ends them in order.

Owns the port, the link's listening socket, the shared memories, the meaning of signals and the
looks at who hangs. Carries no request and imports neither torch nor grpc: little can bring it down.
"""

import asyncio
import dataclasses
import itertools
import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.server.config import ServerConfig
from penstock.server.link.board import create_beats, create_board
from penstock.server.link.control_frames import Drain, FromChild, LogLevel
from penstock.server.observe.logs import IN_BANNER, LOG_LEVELS, set_log_level
from penstock.server.processes.child import ChildFailed
from penstock.server.processes.crew import Crew
from penstock.server.processes.drain import drain_in_order
from penstock.server.processes.engine_place import EnginePlace
from penstock.server.processes.exit_codes import (
    EXIT_GAVE_UP,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
)
from penstock.server.processes.flight_memory import FlightMemory
from penstock.server.processes.front_place import NUM_ROWS, FrontPlace
from penstock.server.processes.hang_watch import NUM_LOOKS
from penstock.server.processes.leftovers import (
    FOLDER_PREFIX,
    SOCKET_NAME,
    remove_leftovers,
)
from penstock.server.processes.listen_port import PortUnavailable, reserve_port
from penstock.server.processes.observer_place import ObserverPlace
from penstock.server.processes.orphans import LIMIT_S, Orphans
from penstock.server.processes.rolling import RollingRestart
from penstock.server.processes.slot import KeepsDying, Slot
from penstock.server.processes.surroundings import Surroundings

log = logging.getLogger(__name__)

_KILL_S = 5.0 + LIMIT_S
_LINK_BACKLOG = 64


class CannotStart(Exception):
    """The service did not come up; the message is for the operator."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReady:
    """What was started, and where it listens. `resources`: what the executor reports of itself."""

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
    """Runs one service. `announce` is called once, when every process is ready."""

    def __init__(self, config: ServerConfig, announce: Callable[[ServiceReady], None]) -> None:
        self._config = config
        self._announce = announce
        self._started_s = time.monotonic()
        self._port = 0
        self._socket_path = Path()
        self._link_listener: socket.socket | None = None
        self._board_fd = -1
        self._beats_fd = -1
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._forced_by = 0
        self._is_ready = False
        self._orphans = Orphans()
        self._grace_s: float | None = None
        self._flight = FlightMemory(config.observer.flight)
        self._dumps: set[asyncio.Task[None]] = set()
        self._roll: asyncio.Task[None] | None = None
        self._crew = Crew()
        self._engine = EnginePlace(self._surroundings, orphans=self._orphans, flight=self._flight)
        front_ids = itertools.count(1)
        self._fronts = [
            FrontPlace(number, self._surroundings, orphans=self._orphans, front_ids=front_ids)
            for number in range(1, config.num_fronts + 1)
        ]
        self._observer: ObserverPlace | None = None
        if config.observer.is_needed:
            self._observer = ObserverPlace(
                config.observer,
                surroundings=self._surroundings,
                start=self._orphans.start,
                on_message=self._on_observer_message,
            )

    async def run(self) -> int:
        """Serve until told to stop; the exit code. Raises CannotStart."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._on_dump_signal)
        loop.add_signal_handler(signal.SIGUSR2, self._on_roll_signal)
        self._orphans.adopt()
        with ExitStack() as stack:
            self._open_sockets(stack)
            self._open_memories(stack)
            log.info(
                "starting: model=%s port=%d link=%s",
                self._config.model,
                self._port,
                self._socket_path,
                extra=IN_BANNER,
            )
            # The engine first: it takes longest.
            for slot in (self._engine.slot, *(place.slot for place in self._fronts)):
                self._crew.join(slot)
            watchers: dict[Slot, asyncio.Task[int]] = {}
            if self._observer is not None:
                watching = asyncio.create_task(self._observer.keep_alive(), name="observer")
                watchers[self._observer.slot] = watching
            looks = [
                asyncio.create_task(_look_again_and_again(limit_s, look))
                for limit_s, look in (
                    (self._config.engine_hang_s, self._engine.look),
                    (self._config.front_hang_s, self._look_at_fronts),
                )
                if limit_s
            ]
            try:
                return await self._serve(watchers)
            finally:
                for look in looks:
                    look.cancel()
                await self._end_everybody(watchers)

    async def _end_everybody(self, watchers: dict[Slot, asyncio.Task[int]]) -> None:
        """Whoever still lives, by force."""
        self._break_off_roll()
        for slot in (*self._crew.slots, *watchers):
            slot.kill()
        keepers = (*self._crew.keepers, *watchers.values())
        await asyncio.wait(keepers, timeout=_KILL_S)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, *self._dumps, return_exceptions=True)
        await self._orphans.end_all("the service")

    async def _serve(self, watchers: dict[Slot, asyncio.Task[int]]) -> int:
        crew, observed = self._crew, watchers.values()
        await self._until_stop(self._all_ready(watchers), *map(_end_of, observed))
        if any(watcher.done() and watcher.exception() is None for watcher in observed):
            # It was given up on while others still start.
            await self._until_stop(crew.all_ready())
        try:
            crew.raise_first()
            for watcher in observed:
                if watcher.done():
                    watcher.result()
        except (ChildFailed, KeepsDying) as failure:
            raise CannotStart(str(failure)) from failure
        if self._stop.is_set():
            return EXIT_OK
        self._tell_ready()
        # Who only watches may go: the service stays.
        await self._until_stop()
        self._break_off_roll()
        try:
            crew.raise_first()
        except KeepsDying as failure:
            log.critical("giving up: %s", failure)
            self._stop.set()  # a signal from here on is the second order to stop
            await self._drain(watchers)
            return EXIT_GAVE_UP
        return await self._drain(watchers)

    async def _all_ready(self, watchers: dict[Slot, asyncio.Task[int]]) -> None:
        await self._crew.all_ready()
        for slot in watchers:
            await slot.is_ready.wait()

    async def _until_stop(self, *events: Coroutine[Any, Any, object]) -> None:
        """Wait for the order to stop, for a slot that stays empty, or for one of the events."""
        always = (self._stop.wait(), self._crew.someone_lost())
        waits = [asyncio.create_task(event) for event in (*always, *events)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _drain(self, watchers: dict[Slot, asyncio.Task[int]]) -> int:
        """Fronts finish what they have, then the engine ends, then the observer; the exit code."""
        crew = self._crew
        gone = {slot for slot in crew.slots if crew.keeper_of(slot).done()}  # told already
        order = asyncio.create_task(
            drain_in_order(
                crew,
                self._engine.slot,
                watchers,
                grace_s=self._current_grace_s,
                engine_exit_s=self._config.executor.max_exit_s,
            )
        )
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({order, forced}, return_when=asyncio.FIRST_COMPLETED)
        order.cancel()
        forced.cancel()
        if self._forced.is_set():
            return EXIT_SIGNAL_BASE + self._forced_by
        bad = [slot.name for slot in crew.slots if slot not in gone and crew.ended_badly(slot)]
        if bad:
            log.error("did not end in order: %s", ", ".join(bad))
        return EXIT_GAVE_UP if bad else EXIT_OK

    @property
    def _current_grace_s(self) -> float:
        return self._config.drain_grace_s if self._grace_s is None else self._grace_s

    def _look_at_fronts(self, limit_s: float) -> None:
        for front in self._fronts:
            front.look(limit_s)

    def _open_sockets(self, stack: ExitStack) -> None:
        try:
            reserved = stack.enter_context(reserve_port(self._config.host, self._config.port))
        except PortUnavailable as error:
            raise CannotStart(str(error)) from error
        self._port = reserved.getsockname()[1]
        remove_leftovers(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # mode 0700
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._socket_path = folder / SOCKET_NAME
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(str(self._socket_path))
        except OSError as error:
            raise CannotStart(f"cannot bind {self._socket_path}: {error}") from error
        listener.listen(_LINK_BACKLOG)
        self._link_listener = listener
        if self._observer is not None:
            try:
                self._observer.open(folder, stack)
            except PortUnavailable as error:
                raise CannotStart(str(error)) from error

    def _open_memories(self, stack: ExitStack) -> None:
        self._flight.create(self._port)
        stack.callback(self._flight.close)
        try:
            self._board_fd = create_board(self._config.executor.max_num_seqs)
            stack.callback(os.close, self._board_fd)
            self._beats_fd = create_beats(NUM_ROWS)
            stack.callback(os.close, self._beats_fd)
        except OSError as error:
            raise CannotStart(f"there is no shared memory: {error}") from error

    def _surroundings(self) -> Surroundings:
        assert self._link_listener is not None
        return Surroundings(
            # With the port that was found, where any would do.
            config=dataclasses.replace(self._config, port=self._port),
            socket_path=self._socket_path,
            listener_fd=self._link_listener.fileno(),
            observer_path=None if self._observer is None else self._observer.socket_path,
            flight_fd=self._flight.fd,
            board_fd=self._board_fd,
            beats_fd=self._beats_fd,
            started_s=self._started_s,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("%s again: stopping now", number.name)
            self._forced_by = number
            self._forced.set()
        else:
            log.info("%s: draining, at most %g s", number.name, self._config.drain_grace_s)
            self._stop.set()

    def _on_dump_signal(self) -> None:
        dump = asyncio.get_running_loop().create_task(self._flight.dump("asked"))
        self._dumps.add(dump)
        dump.add_done_callback(self._dumps.discard)

    def _on_roll_signal(self) -> None:
        if self._stop.is_set() or not self._is_ready:
            log.warning("SIGUSR2: the service is not up, nothing is restarted")
        elif self._roll is not None and not self._roll.done():
            log.warning("SIGUSR2: a rolling restart is under way already")
        else:
            roll = RollingRestart(
                self._crew,
                self._engine,
                self._fronts,
                grace_s=lambda: self._current_grace_s,
                can_replay=self._config.front.max_replays > 0,
            )
            self._roll = asyncio.get_running_loop().create_task(roll.run(), name="rolling restart")

    def _break_off_roll(self) -> None:
        if self._roll is not None:
            self._roll.cancel()

    def _on_observer_message(self, frame: FromChild) -> None:
        """What an operator wants of the service as a whole."""
        match frame:
            case Drain(timeout_s=timeout_s):
                self._drain_ordered(timeout_s)
            case LogLevel(level=level) if level in LOG_LEVELS:
                log.info("log level %s, by an operator", level)
                set_log_level(level)
                # For processes that start from now on.
                self._config = dataclasses.replace(self._config, log_level=level)
            case _:
                log.error("what the observer says makes no sense: %.100s", frame)

    def _drain_ordered(self, timeout_s: float | None) -> None:
        if self._stop.is_set():
            return  # it is on its way, in the time it was given first
        if timeout_s is not None and timeout_s >= 0 and math.isfinite(timeout_s):
            self._grace_s = timeout_s
        log.info("an operator: draining, at most %g s", self._current_grace_s)
        self._stop.set()

    def _tell_ready(self) -> None:
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
                resources=self._engine.slot.facts.get("resources", ""),
                has_tls=config.security.has_tls,
                operations_address=None if observer is None else observer.operations_address,
                metrics_url=None if observer is None else observer.metrics_url,
            )
        )


async def _end_of(watcher: "asyncio.Task[int]") -> None:
    await asyncio.wait([watcher])


async def _look_again_and_again(limit_s: float, look: Callable[[float], None]) -> None:
    while True:
        await asyncio.sleep(limit_s / NUM_LOOKS)
        look(limit_s)
