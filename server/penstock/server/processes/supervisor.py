"""The supervisor: starts engine, fronts and observer, keeps them alive, ends them in order.

Owns the processes, the port, the link's listening socket, the flight recorder's memory and the
meaning of signals. Carries no request and imports neither torch nor grpc: little can bring it down.
"""

import asyncio
import dataclasses
import logging
import math
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.server.config import EngineLaunch, FrontLaunch, ServerConfig, launch_to_json
from penstock.server.logs import LOG_LEVELS, set_log_level
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.environment import engine_environment, front_environment
from penstock.server.processes.exit_codes import (
    EXIT_CANNOT_START,
    EXIT_GAVE_UP,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
)
from penstock.server.processes.flight_memory import FlightMemory
from penstock.server.processes.listen_port import PortUnavailable, reserve_port
from penstock.server.processes.modules import ENGINE_MODULE, FRONT_MODULE
from penstock.server.processes.observer_place import ObserverPlace, Surroundings
from penstock.server.processes.orphans import LIMIT_S, Orphans
from penstock.server.processes.slot import KeepsDying, Slot

log = logging.getLogger(__name__)

_AFTER_GRACE_S = 1.4
"""What fronts get beyond the grace to write their last messages."""
_ENGINE_EXIT_S = 0.4
"""What an engine has at least, once the fronts have ended; its executor may ask for more."""
_OBSERVER_EXIT_S = 1.8
"""What an observer has once all others have ended: it needs no more, and nobody waits longer."""
_OBSERVER_TURN_S = 0.5
"""When, after the grace, an observer is told to finish whoever else still has not ended: what it
holds must leave before all is over, and who hangs has nothing more to tell it."""
_LAST_EXIT_S = 1.7
"""When, after the grace, an observer that still has not ended is killed: all is over after two
seconds."""
_KILL_S = 5.0 + LIMIT_S
_LINK_BACKLOG = 64


class CannotStart(Exception):
    """The service did not come up; the message is for the operator."""


class Supervisor:
    """Runs one service. `announce` gets the one line that says it is ready."""

    def __init__(self, config: ServerConfig, announce: Callable[[str], None]) -> None:
        self._config = config
        self._announce = announce
        self._started_s = time.monotonic()
        self._port = 0
        self._socket_path = Path()
        self._link_listener: socket.socket | None = None
        self._num_engines = 0
        self._num_fronts = 0
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._forced_by = 0
        self._orphans = Orphans()
        self._grace_s: float | None = None
        self._flight = FlightMemory(config.observer.flight)
        self._dumps: set[asyncio.Task[None]] = set()
        self._engine = Slot("engine", self._spawn_engine, self._after_engine)
        self._fronts = [
            Slot(f"front {number}", self._spawn_front) for number in range(1, config.num_fronts + 1)
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
        self._orphans.adopt()
        with ExitStack() as stack:
            self._open_sockets(stack)
            log.info(
                "starting: model=%s port=%d link=%s",
                self._config.model,
                self._port,
                self._socket_path,
            )
            # The engine first: it takes longest.
            keepers = {
                slot: asyncio.create_task(slot.keep_alive(), name=slot.name)
                for slot in (self._engine, *self._fronts)
            }
            watchers: dict[Slot, asyncio.Task[int]] = {}
            if self._observer is not None:
                watching = asyncio.create_task(self._observer.keep_alive(), name="observer")
                watchers[self._observer.slot] = watching
            try:
                return await self._serve(keepers, watchers)
            finally:
                everybody = {**keepers, **watchers}
                for slot in everybody:
                    slot.kill()
                await asyncio.wait(everybody.values(), timeout=_KILL_S)
                for keeper in everybody.values():
                    keeper.cancel()
                await asyncio.gather(*everybody.values(), *self._dumps, return_exceptions=True)
                await self._orphans.end_all("the service")

    async def _serve(
        self, keepers: dict[Slot, asyncio.Task[int]], watchers: dict[Slot, asyncio.Task[int]]
    ) -> int:
        everybody = {**keepers, **watchers}
        await self._until_stop(everybody.values(), _all_ready(everybody))
        if any(watcher.done() and watcher.exception() is None for watcher in watchers.values()):
            # It was given up on while others still start.
            await self._until_stop(keepers.values(), _all_ready(keepers))
        try:
            _raise_first(everybody.values())
        except (ChildFailed, KeepsDying) as failure:
            raise CannotStart(str(failure)) from failure
        if self._stop.is_set():
            return EXIT_OK
        self._tell_ready()
        # Who only watches may go: the service stays.
        await self._until_stop(keepers.values())
        try:
            _raise_first(keepers.values())
        except KeepsDying as failure:
            log.critical("giving up: %s", failure)
            self._stop.set()  # a signal from here on is the second order to stop
            await self._drain(keepers, watchers)
            return EXIT_GAVE_UP
        return await self._drain(keepers, watchers)

    async def _until_stop(
        self, keepers: Iterable["asyncio.Task[int]"], *events: Coroutine[Any, Any, object]
    ) -> None:
        """Wait for the order to stop, for a slot that stays empty, or for one of the events."""
        waits = [asyncio.create_task(event) for event in (self._stop.wait(), *events)]
        await asyncio.wait({*waits, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _drain(
        self, keepers: dict[Slot, asyncio.Task[int]], watchers: dict[Slot, asyncio.Task[int]]
    ) -> int:
        """Fronts finish what they have, then the engine ends, then the observer; the exit code."""
        gone = {slot for slot, keeper in keepers.items() if keeper.done()}  # told already
        order = asyncio.create_task(self._drain_in_order(keepers, watchers))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({order, forced}, return_when=asyncio.FIRST_COMPLETED)
        order.cancel()
        forced.cancel()
        if self._forced.is_set():
            return EXIT_SIGNAL_BASE + self._forced_by
        bad = [
            slot.name
            for slot, keeper in keepers.items()
            if slot not in gone
            and (not keeper.done() or keeper.exception() is not None or keeper.result() != EXIT_OK)
        ]
        if bad:
            log.error("did not end in order: %s", ", ".join(bad))
        return EXIT_GAVE_UP if bad else EXIT_OK

    async def _drain_in_order(
        self, keepers: dict[Slot, asyncio.Task[int]], watchers: dict[Slot, asyncio.Task[int]]
    ) -> None:
        self._engine.forbid_restart()
        if not self._engine.is_ready.is_set():
            # It carries nothing yet. A load may sit in foreign code for minutes, deaf to orders.
            self._engine.kill()
        for front in self._fronts:
            front.retire(self._grace_s)
        grace_s = self._config.drain_grace_s if self._grace_s is None else self._grace_s
        grace_end_s = time.monotonic() + grace_s
        await asyncio.gather(
            self._end_engine(keepers, grace_end_s),
            _end_watchers(watchers, keepers.values(), grace_end_s),
        )

    async def _end_engine(self, keepers: dict[Slot, asyncio.Task[int]], grace_end_s: float) -> None:
        """Once the fronts, that have been told, have ended, or are too late."""
        limit_s = grace_end_s + _AFTER_GRACE_S
        await asyncio.wait(
            [keepers[front] for front in self._fronts], timeout=limit_s - time.monotonic()
        )
        self._engine.retire()
        # An executor may need seconds to take itself down: it has what the fronts left, and what it
        # asks for, since nothing is served meanwhile.
        left_s = limit_s + _ENGINE_EXIT_S - time.monotonic()
        await asyncio.wait(
            [keepers[self._engine]], timeout=max(left_s, self._config.executor.max_exit_s)
        )

    def _open_sockets(self, stack: ExitStack) -> None:
        try:
            reserved = stack.enter_context(reserve_port(self._config.host, self._config.port))
        except PortUnavailable as error:
            raise CannotStart(str(error)) from error
        self._port = reserved.getsockname()[1]
        folder = Path(tempfile.mkdtemp(prefix="penstock-"))  # mode 0700
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._socket_path = folder / "engine.sock"
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
        self._flight.create(self._port)
        stack.callback(self._flight.close)

    async def _spawn_engine(self) -> Child:
        assert self._link_listener is not None
        self._num_engines += 1
        fd = self._link_listener.fileno()
        launch = EngineLaunch(
            server=self._config,
            socket_path=self._socket_path,
            listener_fd=fd,
            epoch=self._num_engines,
            flight_fd=self._flight.fd,
        )
        return await self._orphans.start(
            lambda: Child.spawn(
                "engine",
                ENGINE_MODULE,
                launch_to_json(launch),
                environment={**engine_environment(self._config.executor), **self._orphans.mark},
                inherited_fds=(fd,) if self._flight.fd < 0 else (fd, self._flight.fd),
            )
        )

    async def _spawn_front(self) -> Child:
        # A new id for every life: keys of the dead one must not mean anything to the next.
        self._num_fronts += 1
        launch = FrontLaunch(
            server=self._config,
            socket_path=self._socket_path,
            front_id=self._num_fronts,
            port=self._port,
            observer_path=None if self._observer is None else self._observer.socket_path,
        )
        return await self._orphans.start(
            lambda: Child.spawn(
                "front",
                FRONT_MODULE,
                launch_to_json(launch),
                environment={**front_environment(), **self._orphans.mark_to_know},
            )
        )

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            # With the port that was found, where any would do.
            config=dataclasses.replace(self._config, port=self._port),
            socket_path=self._socket_path,
            flight_fd=self._flight.fd,
            started_s=self._started_s,
        )

    async def _after_engine(self, code: int, was_ordered: bool) -> None:
        """What a dead engine leaves: its last steps, for us to keep, and processes, to be ended."""
        if not was_ordered and code != EXIT_CANNOT_START:
            # Before the next engine makes the memory its own.
            await self._flight.dump("engine died" if code else "engine ended")
        await self._orphans.end_all("the engine")

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

    def _on_observer_message(self, message: dict[str, Any]) -> None:
        """What an operator wants of the service as a whole."""
        match message:
            case {"kind": "drain", "timeout_s": None | float() | int() as timeout_s}:
                self._drain_ordered(timeout_s)
            case {"kind": "log_level", "level": str(level)} if level in LOG_LEVELS:
                log.info("log level %s, by an operator", level)
                set_log_level(level)
                # For processes that start from now on.
                self._config = dataclasses.replace(self._config, log_level=level)
            case _:
                log.error("what the observer says makes no sense: %.100s", message)

    def _drain_ordered(self, timeout_s: float | None) -> None:
        if self._stop.is_set():
            return  # it is on its way, in the time it was given first
        if timeout_s is not None and timeout_s >= 0 and math.isfinite(timeout_s):
            self._grace_s = float(timeout_s)
        grace_s = self._config.drain_grace_s if self._grace_s is None else self._grace_s
        log.info("an operator: draining, at most %g s", grace_s)
        self._stop.set()

    def _tell_ready(self) -> None:
        self._announce(self._ready_line())
        for line in () if self._observer is None else self._observer.port_lines():
            log.info("%s", line)
            self._announce(line)

    def _ready_line(self) -> str:
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        fronts = "1 front" if config.num_fronts == 1 else f"{config.num_fronts} fronts"
        return (
            f"penstock ready on {host}:{self._port} (model {config.model},"
            f" {config.executor.kind.value} executor, {fronts},"
            f" {time.monotonic() - self._started_s:.1f} s)"
        )


async def _end_watchers(
    watchers: dict[Slot, asyncio.Task[int]],
    keepers: Iterable["asyncio.Task[int]"],
    grace_end_s: float,
) -> None:
    """After all that they watch, or when the rest of their time is what they need."""
    turn_s = grace_end_s + _OBSERVER_TURN_S
    await asyncio.wait(keepers, timeout=max(0.0, turn_s - time.monotonic()))
    for slot, watcher in watchers.items():
        left_s = grace_end_s + _LAST_EXIT_S - time.monotonic()
        limit_s = max(0.0, min(_OBSERVER_EXIT_S, left_s))
        slot.retire(limit_s)
        _, late = await asyncio.wait([watcher], timeout=limit_s)
        if late:
            log.warning("the %s did not end in time", slot.name)


async def _all_ready(slots: Iterable[Slot]) -> None:
    for slot in slots:
        await slot.is_ready.wait()


def _raise_first(keepers: Iterable["asyncio.Task[int]"]) -> None:
    """Raise what ended a slot, if something did."""
    for keeper in keepers:
        if keeper.done():
            keeper.result()
