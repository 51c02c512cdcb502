"""The engine's place in the service: its process, what it hangs on, what it leaves when it dies.

Owns the epochs, the account of deaths by request and the judgement that an engine hangs. The next
one is told whom to be careful with.
"""

import logging
import time
from collections.abc import Callable

from penstock.server.config import EngineLaunch, encode_launch, num_usable_cores
from penstock.server.link.board import BoardView
from penstock.server.logs.rate import ALWAYS
from penstock.server.processes.autopsy import Autopsy, EngineDeath, is_its_own
from penstock.server.processes.child import Child
from penstock.server.processes.environment import engine_environment
from penstock.server.processes.exit_codes import EXIT_CANNOT_START
from penstock.server.processes.flight_memory import FlightMemory
from penstock.server.processes.hang_watch import HangWatch
from penstock.server.processes.modules import ENGINE_MODULE
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.slot import Slot
from penstock.server.processes.surroundings import Surroundings

log = logging.getLogger(__name__)

_EXIT_S = 5.0
"""What an engine that is to be followed by another gets to end, beside what its executor wants."""


class EnginePlace:
    """`surroundings` tells them when a process starts."""

    def __init__(
        self,
        surroundings: Callable[[], Surroundings],
        *,
        orphans: Orphans,
        flight: FlightMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot = Slot("engine", self._spawn, self._after)
        self._surroundings = surroundings
        self._orphans = orphans
        self._flight = flight
        self._autopsy = Autopsy(clock)
        self._watch = HangWatch()
        self._board: BoardView | None = None
        self._epoch = 0
        self._is_hung = False

    def look(self, limit_s: float) -> None:
        """End the engine if it has not come round for so long; called ten times in that time."""
        board = self._board
        if board is None or self._is_hung or not self.slot.may_hang:
            self._watch.forget()
        elif self._watch.look(board.epoch, board.num_beats):
            self._is_hung = True
            log.error("the engine has not come round for %g s: killing it", limit_s, extra=ALWAYS)
            self.slot.abort()
        elif self._watch.is_halfway:
            log.warning("the engine has not come round for %g s", limit_s / 2)

    async def restart(self) -> None:
        """Have the engine end between two steps, and another take over; returns once it is up."""
        limit_s = _EXIT_S + self._surroundings().config.executor.max_exit_s
        await self.slot.restart(limit_s)

    async def _spawn(self) -> Child:
        now = self._surroundings()
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
            suspects=self._autopsy.suspects(),
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
        """What a dead engine leaves: its last steps, for us to keep, and processes, to be ended."""
        if not was_ordered and code != EXIT_CANNOT_START:
            self._hold_inquest(code)
            # Before the next engine makes the memory its own.
            await self._flight.dump("engine died" if code else "engine ended")
        await self._orphans.end_all("the engine")

    def _hold_inquest(self, code: int) -> None:
        board = self._board
        # An engine that died before it made the board its own had nobody.
        if board is None or board.epoch != self._epoch:
            return
        death = EngineDeath(
            is_its_own=is_its_own(code, was_hung=self._is_hung),
            keys_in_progress=board.keys_in_progress(),
            keys_on_probation=board.keys_on_probation(),
            was_hung=self._is_hung,
        )
        self._autopsy.note(death)
        num_tried = sum(not suspect.is_poison for suspect in self._autopsy.suspects())
        if num_tried and death.keys_in_progress:
            log.warning(
                "%d requests were with the engine: what comes back of %d that may have killed it"
                " is tried one by one",
                len(death.keys_in_progress),
                num_tried,
            )
