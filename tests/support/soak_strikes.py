"""What a soak does to its service's processes, and how long clients waited for it.

Owns the signals; they go to children of the service and to client processes of the load alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from support.service import Service
from support.soak_load import Load
from support.soak_plan import SoakPlan, Strike, schedule
from support.soak_watch import Watch, has_engine

PAUSE_S = 1.0
_STOPPED_CLIENT_S = 4.0
_GONE_S = 30.0
_ROLES = {
    Strike.ENGINE_HANG: "engine",
    Strike.ENGINE_PAUSE: "engine",
    Strike.FRONT_PAUSE: "front",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault: `at_s` from the start, and when a canary sent right after it was served."""

    strike: Strike
    at_s: float
    recovery_s: float | None
    note: str = ""


class Striker:
    """Plays the schedule. `tell`: is reported of each fault, for people who watch."""

    def __init__(
        self,
        plan: SoakPlan,
        service: Service,
        load: Load,
        watch: Watch,
        tell: Callable[[str], None],
    ) -> None:
        self.struck: list[Struck] = []
        self._plan = plan
        self._service = service
        self._load = load
        self._watch = watch
        self._tell = tell
        self._chance = random.Random(f"{plan.seed}/strikes")

    async def run(self) -> None:
        """Every fault at its time, or later by what an earlier one took too long."""
        begun_s = time.monotonic()
        late_s = 0.0
        async with asyncio.TaskGroup() as group:
            for at_s, strike in schedule(self._plan):
                # Who is late makes all others late: they are not to come on top of each other.
                late_s = max(late_s, time.monotonic() - begun_s - at_s)
                await asyncio.sleep(max(0.0, begun_s + at_s + late_s - time.monotonic()))
                if self._load.is_over:
                    return
                self._tell(f"{time.monotonic() - begun_s:6.1f} s  {strike}")
                group.create_task(self._probe(strike, time.monotonic() - begun_s))
                await self._strike(strike)

    async def _probe(self, strike: Strike, at_s: float) -> None:
        """How long it takes until a client that asks now is served."""
        await asyncio.sleep(0.05)  # the blow lands first
        asked_s = time.monotonic()
        outcome = await self._load.canary()
        first_s = outcome.first_token_s
        recovery_s = None if outcome.cause or first_s is None else first_s - asked_s
        self.struck.append(
            Struck(strike=strike, at_s=at_s, recovery_s=recovery_s, note=outcome.cause)
        )

    async def _strike(self, strike: Strike) -> None:
        match strike:
            case Strike.ENGINE_KILL:
                self._signal("engine", signal.SIGKILL)
            case Strike.FRONT_KILL:
                # What a front and its engine know of a request is in these two: not both at once.
                await self._watch.until(has_engine, _GONE_S)
                self._signal("front", signal.SIGKILL)
            case Strike.ENGINE_PAUSE | Strike.FRONT_PAUSE:
                await self._pause(_ROLES[strike])
            case Strike.ENGINE_HANG:
                await self._hang(_ROLES[strike])
            case Strike.CONNECTIONS_LOST:
                await self._load.lines.lose_half()
            case Strike.CLIENT_KILL:
                client = await self._load.hold(self._service.address)
                client.send_signal(signal.SIGKILL)
            case Strike.CLIENT_STOP:
                client = await self._load.hold(self._service.address)
                client.send_signal(signal.SIGSTOP)
                await asyncio.sleep(_STOPPED_CLIENT_S)
                client.send_signal(signal.SIGKILL)
            case Strike.ROLLING_RESTART:
                self._service.signal(signal.SIGUSR2)
            case Strike.DEADLY_PROMPT:
                await self._load.deadly()

    def _signal(self, role: str, number: signal.Signals) -> psutil.Process | None:
        """To one process of that role, if one is there."""
        processes = self._watch.alive(role)
        if not processes:
            return None
        process = self._chance.choice(processes)
        _send(process, number)
        return process

    async def _pause(self, role: str) -> None:
        process = self._signal(role, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        if process is not None:
            _send(process, signal.SIGCONT)

    async def _hang(self, role: str) -> None:
        """Stop it and leave it so: a caller that watches it has to find out."""
        process = self._signal(role, signal.SIGSTOP)
        until_s = time.monotonic() + _GONE_S
        while process is not None and process in self._watch.alive(role):
            if time.monotonic() > until_s:
                self._watch.faults.append(f"a stopped {role} was not replaced")
                _send(process, signal.SIGCONT)
                return
            await asyncio.sleep(0.1)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """To that very process, and no client who has its number by now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
