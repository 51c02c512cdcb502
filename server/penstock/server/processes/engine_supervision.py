"""Supervises the engine process: starts it, detects hangs, and cleans up after a crash.

Assigns the epochs (the numbers of the engine starts). Owns the descriptor of the flight recorder's
memory. Engines and observers inherit the descriptor, and it stays open here when they die. Contains
the crash attribution: after a crash, it selects the requests that the next engine runs one at a
time (probation), and the requests that it rejects (quarantine).
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.server.config import EngineLaunch, encode_launch
from penstock.server.engine.quarantine import SuspectedRequest
from penstock.server.ipc.board import BoardView
from penstock.server.observe.config import FlightConfig
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.child import Child
from penstock.server.processes.exit_codes import EXIT_CANNOT_START
from penstock.server.processes.hang_watch import HangWatch
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.spawn_context import ENGINE_MODULE, SpawnContext, engine_environment
from penstock.server.processes.supervised_process import SupervisedProcess
from penstock.server.usable_cores import num_usable_cores

logger = logging.getLogger(__name__)
_EXIT_S = 5.0
"""Time for an engine to exit in a restart, in seconds, in addition to the time that its executor
requests."""
_FORGET_AFTER_S = 600.0
_MAX_KEPT = 4096
_FIRST_PROBATION_TOKENS = 2
_PROBATION_GROWTH = 8
_MAX_PROBATION_TOKENS = 128
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that are sent to the process from outside. Other signals are caused by the process
itself."""


class FlightMemory:
    """The shared memory of the flight recorder, with the last steps of the engine. `fd` is its
    descriptor: -1 before `create`, after `close`, and if the memory could not be allocated."""

    def __init__(self, config: FlightConfig) -> None:
        self.fd = -1
        self._config = config
        self._port = 0
        self._dumping = asyncio.Lock()

    def create(self, port: int) -> None:
        """Create the shared memory. `port` is the service's port, for the names of files.

        If the memory cannot be allocated, logs an error, and the service runs without a flight
        recorder.
        """
        self._port = port
        # Imported here, because it loads numpy, which would slow down the start of the command
        # line.
        from penstock.server.observe.flight.memory import create_memory

        try:
            self.fd = create_memory(self._config.num_steps, "penstock-flight")
        except (OSError, ValueError) as error:
            logger.error("flight recorder unavailable: %s", error)  # noqa: TRY400 (in one line)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def dump(self, why: str) -> None:
        """Write the content to a file in the flight folder. `why` is a part of the file name. Logs
        the path or the failure."""
        from penstock.server.observe.flight.reader import dump

        if self.fd < 0:
            logger.warning("the flight recorder is off: no record was written")
            return
        async with self._dumping:
            try:
                path = await asyncio.to_thread(
                    dump, self.fd, self._config.folder, why, port=self._port
                )
            except (OSError, ValueError) as error:
                logger.warning("the flight record was not written: %s", error)
            else:
                logger.info("flight record (%s): %s", why, path)


class EngineSupervision:
    """Supervises one engine. `spawn_context` returns the resources for each start."""

    def __init__(
        self,
        spawn_context: Callable[[], SpawnContext],
        *,
        orphans: Orphans,
        flight: FlightMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process = SupervisedProcess("engine", self._spawn, self._clean_up)
        self._spawn_context = spawn_context
        self._orphans = orphans
        self._flight = flight
        self._crash_attribution = CrashAttribution(clock)
        self._watch = HangWatch()
        self._board: BoardView | None = None
        self._epoch = 0
        self._is_hung = False

    def check(self, limit_s: float) -> None:
        """Kill the engine if its heartbeat has stopped for `limit_s` seconds; log a warning after
        half of that time.

        Call this NUM_CHECKS times in that period (see `hang_watch.py`).
        """
        board = self._board
        if board is None or self._is_hung or not self.process.may_hang:
            self._watch.reset()
        elif self._watch.check(board.epoch, board.num_heartbeats):
            self._is_hung = True
            logger.error("no heartbeat of the engine for %g s: killing it", limit_s, extra=ALWAYS)
            self.process.abort()
        elif self._watch.is_halfway:
            logger.warning("no heartbeat of the engine for %g s", limit_s / 2)

    async def restart(self) -> None:
        """Stop the engine after its current step and start a new engine.

        Kills the engine if it does not exit in time. Returns when the new engine is ready.
        """
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

    async def _clean_up(self, code: int, was_ordered: bool) -> None:
        """Clean up after an engine: terminate the processes that it left running. After a crash,
        first attribute the crash to requests and save the flight record."""
        if not was_ordered and code != EXIT_CANNOT_START:
            self._attribute_crash(code)
            # Save it before the next engine reuses the memory.
            await self._flight.dump("engine died" if code else "engine ended")
        await self._orphans.end_all("the engine")

    def _attribute_crash(self, code: int) -> None:
        board = self._board
        # If the engine died before it opened the board, there are no requests.
        if board is None or board.epoch != self._epoch:
            return
        death = EngineDeath(
            is_own_failure=is_own_failure(code, was_hung=self._is_hung),
            keys_in_progress=board.keys_in_progress(),
            keys_on_probation=board.keys_on_probation(),
            was_hung=self._is_hung,
        )
        self._crash_attribution.record_death(death)
        num_tried = sum(not suspect.is_poison for suspect in self._crash_attribution.suspects())
        if num_tried and death.keys_in_progress:
            logger.warning(
                "%d requests were in the engine; %d of them may have crashed it and will run alone",
                len(death.keys_in_progress),
                num_tried,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeath:
    """The circumstances of the death of an engine.

    Attributes:
        is_own_failure: True if the engine itself failed, False if it was killed from outside.
        was_hung: True if it made no progress. The device or the driver may be the cause.
        keys_in_progress: Keys (numbers) of the outputs in its last steps, and the first key of the
            request that was being submitted.
        keys_on_probation: Keys of the suspected request that was on probation.
    """

    is_own_failure: bool
    keys_in_progress: frozenset[int]
    keys_on_probation: frozenset[int] = frozenset()
    was_hung: bool = False


def is_own_failure(code: int, *, was_hung: bool) -> bool:
    """Return True if the engine itself failed, False if it was killed from outside or ended
    normally.

    `code` is the exit code, negative for a signal. `was_hung` is True if the supervisor killed the
    engine because it made no progress.
    """
    return was_hung or code > 0 or (code < 0 and -code not in _FROM_OUTSIDE)


@dataclass(slots=True, eq=False)
class _CrashHistory:
    num_deaths: int = 0
    num_own: int = 0
    num_on_probation: int = 0
    last_s: float = 0.0
    is_poison: bool = False

    @property
    def needs_probation(self) -> bool:
        return self.num_own > 0 or self.num_deaths > 1


class CrashAttribution:
    """Counts engine deaths by output key, and decides which requests are suspected.

    The key of an output is its number in the engine; keys are not reused. Counts are kept for
    `_FORGET_AFTER_S` after the last death, for at most `_MAX_KEPT` keys.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[int, _CrashHistory] = {}

    def record_death(self, death: EngineDeath) -> None:
        """Count the death of an engine for the requests in progress, and for the request on
        probation if it was in progress."""
        now_s, keys = self._clock(), death.keys_in_progress
        # A request on probation that was not in progress was waiting, so it is not counted.
        tried = death.keys_on_probation if keys & death.keys_on_probation else frozenset[int]()
        self._forget(now_s)
        for key in keys | tried:
            account = self._accounts.pop(key, None) or _CrashHistory()
            # Moved to the end, because the most recently used key is last.
            self._accounts[key] = account
            account.num_deaths += 1
            account.num_own += death.is_own_failure
            account.num_on_probation += key in tried
            account.last_s = now_s
        for key in keys | tried:
            self._accounts[key].is_poison |= self._is_quarantined(key, death, tried)

    def suspects(self) -> tuple[SuspectedRequest, ...]:
        """Return the requests that the next engine must run one at a time, or reject."""
        return tuple(
            SuspectedRequest(
                key=key,
                num_probation_tokens=_num_probation_tokens(account),
                is_poison=account.is_poison,
            )
            for key, account in self._accounts.items()
            if account.is_poison or account.needs_probation
        )

    def _is_quarantined(self, key: int, death: EngineDeath, tried: frozenset[int]) -> bool:
        account = self._accounts[key]
        is_alone = death.keys_in_progress == frozenset({key})
        if not death.is_own_failure or (death.was_hung and not is_alone):
            # Two deaths with the same request on probation are no coincidence. (If a process uses
            # up the memory the kernel kills it, which looks like a kill from outside.)
            return account.num_on_probation > 1
        return (is_alone or key in tried) and account.num_deaths > 1

    def _forget(self, now_s: float) -> None:
        for key, account in tuple(self._accounts.items()):
            is_old = account.last_s <= now_s - _FORGET_AFTER_S
            if not is_old and len(self._accounts) <= _MAX_KEPT:
                return
            del self._accounts[key]


def _num_probation_tokens(account: _CrashHistory) -> int:
    """Return the length of the probation, in tokens.

    It is longer for a request that passed a probation and was involved in another crash afterwards,
    because it may fail late.
    """
    num_tokens = _FIRST_PROBATION_TOKENS
    for _ in range(1, account.num_own):
        num_tokens = min(num_tokens * _PROBATION_GROWTH, _MAX_PROBATION_TOKENS)
    return num_tokens
