"""A front's place in the service: its process and the judgement that it hangs.

Owns the ids that fronts get: a new one for every life, so that keys of a dead one mean nothing to
the next.
"""

import logging
from collections.abc import Callable, Iterator

from penstock.server.config import FrontLaunch, encode_launch
from penstock.server.link.board import BeatsView
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.child import Child
from penstock.server.processes.environment import front_environment
from penstock.server.processes.hang_watch import HangWatch
from penstock.server.processes.modules import FRONT_MODULE
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.slot import Slot
from penstock.server.processes.surroundings import Surroundings

log = logging.getLogger(__name__)

NUM_ROWS = 256
"""Of heartbeats: so many fronts may start while an old one still drains."""


class FrontPlace:
    """The place `number`. `front_ids`: where all places take their ids from."""

    def __init__(
        self,
        number: int,
        surroundings: Callable[[], Surroundings],
        *,
        orphans: Orphans,
        front_ids: Iterator[int],
    ) -> None:
        self.number = number
        self.slot = Slot(f"front {number}", self._spawn)
        self._surroundings = surroundings
        self._orphans = orphans
        self._front_ids = front_ids
        self._front_id = 0
        self._watch = HangWatch()
        self._beats: BeatsView | None = None

    def successor(self) -> "FrontPlace":
        """Another place of this number, for the front that is to take over."""
        return FrontPlace(
            self.number, self._surroundings, orphans=self._orphans, front_ids=self._front_ids
        )

    def look(self, limit_s: float) -> None:
        """End the front if it has not come round for so long; called ten times in that time."""
        if self._beats is None or not self.slot.may_hang:
            self._watch.forget()
        elif self._watch.look(
            self._front_id, self._beats.num_beats(self._front_id % NUM_ROWS, self._front_id)
        ):
            log.error(
                "%s has not come round for %g s: killing it", self.slot.name, limit_s, extra=ALWAYS
            )
            self._watch.forget()
            self.slot.abort()

    async def _spawn(self) -> Child:
        now = self._surroundings()
        if self._beats is None:
            self._beats = BeatsView(now.beats_fd)
        self._front_id = next(self._front_ids)
        launch = FrontLaunch(
            server=now.config,
            socket_path=now.socket_path,
            front_id=self._front_id,
            port=now.config.port,
            observer_path=now.observer_path,
            board_fd=now.board_fd,
            beats_fd=now.beats_fd,
            beat_row=self._front_id % NUM_ROWS,
        )
        environment = {**front_environment(), **self._orphans.mark_to_know}
        return await self._orphans.start(
            lambda: Child.spawn(
                "front",
                FRONT_MODULE,
                encode_launch(launch),
                environment=environment,
                inherited_fds=[fd for fd in (now.board_fd, now.beats_fd) if fd >= 0],
            )
        )
