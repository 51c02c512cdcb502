"""Supervises a front (gRPC server process): starts it, detects hangs, and creates its successor in
a rolling restart.

Assigns the ids of fronts. Each process gets a new id. The id is a part of the numbers (keys) of its
requests' outputs, so that keys of a dead front are not reused.
"""

import logging
from collections.abc import Callable, Iterator

from penstock.server.config import FrontLaunch, encode_launch
from penstock.server.ipc.board import LivenessReader
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.child import Child
from penstock.server.processes.hang_watch import HangWatch
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.spawn_context import FRONT_MODULE, SpawnContext, front_environment
from penstock.server.processes.supervised_process import SupervisedProcess

logger = logging.getLogger(__name__)

NUM_ROWS = 256
"""Number of rows for heartbeats. It limits how many fronts may start while old fronts still
drain."""


class FrontSupervision:
    """Supervises one of the fronts of a service. The front keeps its `number` (from 1) when its
    process is restarted. `front_ids` yields the ids of new processes and is shared by all
    fronts."""

    def __init__(
        self,
        number: int,
        spawn_context: Callable[[], SpawnContext],
        *,
        orphans: Orphans,
        front_ids: Iterator[int],
    ) -> None:
        self.number = number
        self.process = SupervisedProcess(f"front slot {number}", self._spawn)
        self._spawn_context = spawn_context
        self._orphans = orphans
        self._front_ids = front_ids
        self._front_id = 0
        self._watch = HangWatch()
        self._heartbeats: LivenessReader | None = None

    def successor(self) -> "FrontSupervision":
        """Return a supervision with the same number. In a rolling restart, its process replaces the
        process of this one."""
        return FrontSupervision(
            self.number, self._spawn_context, orphans=self._orphans, front_ids=self._front_ids
        )

    def check(self, limit_s: float) -> None:
        """Kill the front if its heartbeat has stopped for `limit_s` seconds.

        Call this NUM_CHECKS times in that period (see `hang_watch.py`).
        """
        if self._heartbeats is None or not self.process.may_hang:
            self._watch.reset()
        elif self._watch.check(
            self._front_id,
            self._heartbeats.num_heartbeats(self._front_id % NUM_ROWS, self._front_id),
        ):
            logger.error(
                "no heartbeat of %s for %g s: killing it",
                self.process.name,
                limit_s,
                extra=ALWAYS,
            )
            self._watch.reset()
            self.process.abort()

    async def _spawn(self) -> Child:
        now = self._spawn_context()
        if self._heartbeats is None:
            self._heartbeats = LivenessReader(now.heartbeats_fd)
        self._front_id = next(self._front_ids)
        self.process.name = f"front {self._front_id}"
        launch = FrontLaunch(
            server=now.config,
            socket_path=now.socket_path,
            front_id=self._front_id,
            port=now.config.port,
            observer_path=now.observer_path,
            board_fd=now.board_fd,
            heartbeats_fd=now.heartbeats_fd,
            heartbeat_row=self._front_id % NUM_ROWS,
        )
        environment = {**front_environment(), **self._orphans.mark_for_guard}
        return await self._orphans.start(
            lambda: Child.spawn(
                "front",
                FRONT_MODULE,
                encode_launch(launch),
                environment=environment,
                inherited_fds=[fd for fd in (now.board_fd, now.heartbeats_fd) if fd >= 0],
            )
        )
