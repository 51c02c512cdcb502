"""A `penstock serve` that things are done to, and when it said what about its processes.

Shared by the benchmarks of survival. Owns the process, its log with the time of each line, and the
process ids as they come and go. Everything is on 127.0.0.1 and ends with the block that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from simulated_service import RunFailed

PATIENCE_S = 60.0
_READY = re.compile(r"penstock ready on (\S+) ")
_DOOR = re.compile(r"penstock operations on (\S+)")
_CHILD = re.compile(r"supervised_process: (engine|front) ?\d* is ready: pid=(\d+)")
_NUM_KEPT_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A process of the service is up; `at_s` on the monotonic clock."""

    pid: int
    at_s: float


def simulated(step_s: float = 0.01, **settings: object) -> tuple[str, ...]:
    """Options for the simulated executor, all of whose steps take the same."""
    prices = dict.fromkeys(("prefill_token_s", "decode_slot_s", "context_token_s"), 0.0)
    config = {"pace": "real_time", "cost": {"step_s": step_s, **prices}, **settings}
    return ("--executor", "simulated", "--simulated-config", json.dumps(config))


class LiveService:
    """`address` and `operations` once it is ready; `up`: what became ready, by role, oldest first.

    `log`: the last lines of it.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self.operations = ""
        self.up: dict[str, list[Ready]] = {"engine": [], "front": []}
        self.log: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._news = asyncio.Condition()
        self._readers = [
            asyncio.create_task(self._read(process.stdout)),
            asyncio.create_task(self._read(process.stderr)),
        ]

    async def until_up(self, role: str, count: int) -> Ready:
        """Wait until `count` processes of `role` became ready over all; the last of these."""
        await self._until(lambda: len(self.up[role]) >= count, f"{role} number {count}")
        return self.up[role][count - 1]

    async def until_ready(self, *, has_operations: bool) -> None:
        """Wait until it serves."""
        await self._until(
            lambda: bool(self.address) and (bool(self.operations) or not has_operations), "it"
        )

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        async with asyncio.timeout(PATIENCE_S):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
        return code

    async def _until(self, is_so: object, what: str) -> None:
        assert callable(is_so)
        try:
            async with asyncio.timeout(PATIENCE_S), self._news:
                await self._news.wait_for(lambda: is_so() or self.process.returncode is not None)
        except TimeoutError:
            pass
        if not is_so():
            raise RunFailed(f"{what} did not become ready:\n" + "".join(self.log))

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        async for raw in stream:
            at_s, line = time.monotonic(), raw.decode()
            async with self._news:
                self.log.append(line)
                if found := _READY.match(line):
                    self.address = found[1]
                if found := _DOOR.match(line):
                    self.operations = found[1]
                if found := _CHILD.search(line):
                    self.up[found[1]].append(Ready(pid=int(found[2]), at_s=at_s))
                self._news.notify_all()


@contextlib.asynccontextmanager
async def live_service(
    *options: str, num_fronts: int = 1, has_operations: bool = False
) -> AsyncGenerator[LiveService]:
    """One that serves. Raises RunFailed when it does not come up."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.tools", "serve", "--port", "0"),
        *("--operations-port", "0" if has_operations else "off", "--metrics-port", "off"),
        *("--fronts", str(num_fronts), *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    service = LiveService(process)
    try:
        await service.until_ready(has_operations=has_operations)
        yield service
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            # The second one ends it at once, whatever still runs.
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await service.ended()
        if process.returncode is None:
            process.kill()
            await process.wait()
