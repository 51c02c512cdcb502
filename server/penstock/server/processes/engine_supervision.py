"""Supervision of the engine process: start, hang detection, clean-up after a crash.

Owns the epochs and the crash attribution, whose suspected requests are passed to the next engine.
"""

import logging
import time
from collections.abc import Callable

from penstock.server.config import EngineLaunch, encode_launch
from penstock.server.link.board import BoardView
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.child import Child
from penstock.server.processes.crash_attribution import CrashAttribution, EngineDeath, is_its_own
from penstock.server.processes.exit_codes import EXIT_CANNOT_START
from penstock.server.processes.flight_memory import FlightMemory
from penstock.server.processes.hang_watch import HangWatch
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.spawn_context import ENGINE_MODULE, SpawnContext, engine_environment
from penstock.server.processes.supervised_process import SupervisedProcess
from penstock.server.usable_cores import num_usable_cores

log = logging.getLogger(__name__)

_EXIT_S = 5.0
"""Time for an engine to exit in a restart, in addition to what its executor asks for."""


class EngineSupervision:
    """Supervises one engine. `spawn_context` is called at each start."""

    def __init__(
        self,
        surroundings: Callable[[], SpawnContext],
        *,
        orphans: Orphans,
        flight: FlightMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process = SupervisedProcess("engine", self._spawn, self._after)
        self._spawn_context = surroundings
        self._orphans = orphans
        self._flight = flight
        self._crash_attribution = CrashAttribution(clock)
        self._watch = HangWatch()
        self._board: BoardView | None = None
        self._epoch = 0
        self._is_hung = False

    def check(self, limit_s: float) -> None:
        """Kill the engine when its heartbeat has stopped for `limit_s`; called ten times in that
        time.
        """
        board = self._board
        if board is None or self._is_hung or not self.process.may_hang:
            self._watch.forget()
        elif self._watch.check(board.epoch, board.num_beats):
            self._is_hung = True
            log.error("no heartbeat of the engine for %g s: killing it", limit_s, extra=ALWAYS)
            self.process.abort()
        elif self._watch.is_halfway:
            log.warning("no heartbeat of the engine for %g s", limit_s / 2)

    async def restart(self) -> None:
        """Stop the engine between two steps and start another; returns once that is ready."""
        limit_s = _EXIT_S + self._spawn_context().config.executor.max_exit_s
        await self.process.restart(limit_s)

    async def _spawn(self) -> Child:
        now = self._spawn_context()
        if self._board is None:
            self._board = BoardView(now.board_fd)
        self._epoch += 1
        self._is_hung = False
        launch = EngineLaunch(
            server=now.config,
            socket_path=now.socket_path,
            listener_fd=now.listener_fd,
            epoch=self._epoch,
            flight_fd=now.flight_fd,
            board_fd=now.board_fd,
            suspects=self._crash_attribution.suspects(),
        )
        fds = (now.listener_fd, now.board_fd, now.flight_fd)
        environment = engine_environment(
            now.config.executor, num_cores=num_usable_cores(), num_fronts=now.config.num_fronts
        )
        return await self._orphans.start(
            lambda: Child.spawn(
                "engine",
                ENGINE_MODULE,
                encode_launch(launch),
                environment={**environment, **self._orphans.mark},
                inherited_fds=[fd for fd in fds if fd >= 0],
            )
        )

    async def _after(self, code: int, was_ordered: bool) -> None:
        """Clean up after an engine: keep the record of its last steps, end its child processes."""
        if not was_ordered and code != EXIT_CANNOT_START:
            self._attribute_crash(code)
            # Before the next engine reuses the memory.
            await self._flight.dump("engine died" if code else "engine ended")
        await self._orphans.end_all("the engine")

    def _attribute_crash(self, code: int) -> None:
        board = self._board
        # The engine died before it took over the board: no requests.
        if board is None or board.epoch != self._epoch:
            return
        death = EngineDeath(
            is_its_own=is_its_own(code, was_hung=self._is_hung),
            keys_in_progress=board.keys_in_progress(),
            keys_on_probation=board.keys_on_probation(),
            was_hung=self._is_hung,
        )
        self._crash_attribution.note(death)
        num_tried = sum(not suspect.is_poison for suspect in self._crash_attribution.suspects())
        if num_tried and death.keys_in_progress:
            log.warning(
                "%d requests were in the engine; %d of them may have crashed it and will run alone",
                len(death.keys_in_progress),
                num_tried,
            )
