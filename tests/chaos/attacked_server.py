"""A real service under attack, and a well-behaved client that sends requests during the attack.

Contains that client, and methods that wait until no calls, requests, cache blocks or memory of the
attack are left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import grpc
import psutil

from penstock.client import OperationsClient, ServerStats
from support.observation import is_quiet, until_stats
from support.service import Service, Stream, simulated, started


@dataclass
class Probe:
    """The calls of the well-behaved client: their statuses and durations in seconds."""

    outcomes: list[grpc.StatusCode] = field(default_factory=list[grpc.StatusCode])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def num_errors(self) -> int:
        return sum(code is not grpc.StatusCode.OK for code in self.outcomes)


@dataclass
class AttackedServer:
    """A service with one front, and a client of its operations port."""

    service: Service
    operations: OperationsClient
    front_pid: int

    @property
    def address(self) -> str:
        return self.service.address

    def rss_mib(self) -> float:
        return float(psutil.Process(self.front_pid).memory_info().rss) / 2**20

    @contextlib.asynccontextmanager
    async def probed(self) -> AsyncGenerator[Probe]:
        """Run short generations one after another on one connection during the block; provide their
        record.
        """
        probe, is_over = Probe(), asyncio.Event()
        clock = asyncio.get_running_loop().time

        async def run(channel: grpc.aio.Channel) -> None:
            while not is_over.is_set():
                began_s = clock()
                probe.outcomes.append(await Stream(channel, 3).outcome())
                probe.seconds.append(clock() - began_s)

        async with self.service.channel() as channel:
            task = asyncio.create_task(run(channel))
            try:
                yield probe
            finally:
                is_over.set()
                await task

    async def until(self, is_so: Callable[[ServerStats], bool]) -> ServerStats:
        return await until_stats(self.operations, is_so)

    async def until_idle(self) -> None:
        """Wait until no call is open, no request is live and no cache block is in use."""
        await self.until(
            lambda stats: is_quiet(stats) and not any(front.num_streams for front in stats.fronts)
        )

    async def until_no_request_is_live(self) -> None:
        """Wait until no request is live and no cache block is in use; calls may still be open."""
        await self.until(is_quiet)

    async def until_within(self, max_mib: float) -> None:
        await self.until(lambda _: self.rss_mib() <= max_mib)


@contextlib.asynccontextmanager
async def attacked_server(*arguments: str) -> AsyncGenerator[AttackedServer]:
    """Start a service on the simulated executor; check at the end that it has not exited and has
    logged no error.
    """
    options = ("--operations-port", "0", "--fronts", "1", "--drain-timeout-s", "1")
    async with started(*simulated(), *options, *arguments) as service:
        front_pid = await service.next_pid("front")
        async with OperationsClient(await service.printed_address("operations")) as operations:
            yield AttackedServer(service, operations, front_pid)
        assert service.process.returncode is None, "the service ended"
        assert "Traceback" not in "".join(service.stderr)
        errors = [line for line in service.stderr if " ERROR " in line]
        assert not errors, errors[0]
