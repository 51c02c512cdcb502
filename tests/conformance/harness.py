"""The service that the scenarios run against, and the checks of what a scenario leaves there.

Contains the service, its trace collector, and the faults injected during a scenario, but nothing
specific to programs. Every wait has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from conformance.evidence import DRIVER_PREFIX, EVIDENCE, ExpectedSpans, roots_of
from penstock.client import (
    NO_RETRY,
    Client,
    DeadlineExceeded,
    OperationsClient,
    PenstockError,
    QueueFull,
    ServerStats,
)
from support.otlp_receiver import Receiver, grpc_receiver
from support.service import Service, health_watch, simulated, started

IDLE_S = 60.0
EVIDENCE_S = 60.0
_TICK_S = 0.1
_LAG_TICKS = 15
"""Number of statistics reports after which the counters are current; they are up to 1 s old."""

SERVICE = (
    *simulated(is_readable=False),
    *("--max-num-seqs", "4", "--max-num-waiting", "4", "--fronts", "2"),
    *("--max-seq-len", "262144", "--num-blocks", "20480", "--max-num-batched-tokens", "8192"),
    *("--operations-port", "0", "--deadline-admission", "off"),
)
"""`penstock serve` as every scenario finds it: 10 ms steps, four slots, four queue places, texts of
arbitrary characters.

It exports traces to a collector: they are the evidence.
"""
# On a busy machine an export may take longer than the usual timeout, which would drop it.
_ENVIRONMENT = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
_NUM_WATCHES = 12


class Harness:
    """The service under test: started when first used, and again after a drain."""

    def __init__(self, *, evidence_s: float = EVIDENCE_S) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._service: Service | None = None
        self._collector = Receiver()
        self._engine_pid = 0
        self._evidence_s = evidence_s
        self._evidence = ExpectedSpans(trails=())
        self._num_earlier_spans = 0
        self._num_made_before = 0

    async def address(self) -> str:
        """Start the service if it does not run; return its address once it is ready."""
        return (await self._running()).address

    async def close(self) -> None:
        """Stop the service; `address` then starts another."""
        self._service = None
        await self._stack.aclose()

    async def kill_engine(self) -> None:
        service = await self._running()
        while not service.pids["engine"].empty():
            self._engine_pid = service.pids["engine"].get_nowait()
        os.kill(self._engine_pid, signal.SIGKILL)

    async def drain(self) -> None:
        """Send SIGTERM, and wait until the health of the service is NOT_SERVING on several
        connections.
        """
        service = await self._running()
        async with contextlib.AsyncExitStack() as stack:
            # The kernel spreads connections over the fronts.
            watches = [
                health_watch(await stack.enter_async_context(service.channel()))
                for _ in range(_NUM_WATCHES)
            ]
            for watch in watches:
                await watch.read()
            service.signal(signal.SIGTERM)
            for watch in watches:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it has gone already
                    while (answer := await watch.read()) is not grpc.aio.EOF:
                        if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                            break

    async def begin(self, scenario: str) -> None:
        """Begin a scenario: later spans and tokens are attributed to it."""
        await self._running()
        self._evidence = EVIDENCE[scenario]
        self._num_earlier_spans = len(self._collector.spans())
        if self._evidence.num_made_tokens:
            self._num_made_before = await self._num_made(_LAG_TICKS)

    async def lacks(self) -> str:
        """Return a description of the evidence that a passed scenario did not leave at the service;
        "" if none is missing.
        """
        await asyncio.to_thread(
            self._collector.wait_until, lambda: not self._lacks_spans(), self._evidence_s
        )
        if lacking := self._lacks_spans():
            return f"it passed, but at the service there was {lacking}"
        wanted = self._evidence.num_made_tokens
        if wanted:
            made = await self._num_made(_LAG_TICKS, self._num_made_before + wanted)
            if (num := made - self._num_made_before) < wanted:
                return f"it passed, but the engine made {num} tokens, not {wanted} and more"
        return ""

    async def why_not_idle(self) -> str:
        """Wait up to 60 s after a scenario's end until no request runs and the service serves a new
        one; return "", or a description of what prevents that.
        """
        service = await self._running()
        why = "its counters did not come"
        async with (
            OperationsClient(await service.printed_address("operations")) as operations,
            Client(service.address, retry=NO_RETRY) as client,
        ):
            try:
                # The statistics are up to 1 s old; they only determine when `_why_busy` looks.
                async with contextlib.aclosing(_ticks(operations)) as ticks:
                    async for _ in ticks:
                        why = await _why_busy(operations, client)
                        if not why:
                            return ""
            except PenstockError as error:
                return f"the service does not serve after its end: {error}"
        return f"{why} {IDLE_S:.0f} s after its end"

    def _lacks_spans(self) -> str:
        spans = self._collector.spans()[self._num_earlier_spans :]
        return self._evidence.lacks(roots_of(spans))

    async def _num_made(self, num_ticks: int, enough: int | None = None) -> int:
        """Return the number of tokens that the engine has generated, according to its statistics.

        The result is from report number `num_ticks`, or from an earlier report of at least `enough`
        tokens.
        """
        service = await self._running()
        num_made = num_seen = 0
        async with (
            OperationsClient(await service.printed_address("operations")) as operations,
            contextlib.aclosing(_ticks(operations)) as ticks,
        ):
            async for stats in ticks:
                num_made = sum(model.totals.num_completion_tokens for model in stats.models)
                num_seen += 1
                if num_seen == num_ticks or (enough is not None and num_made >= enough):
                    break
        return num_made

    async def _running(self) -> Service:
        if self._service is None:
            self._collector = self._stack.enter_context(grpc_receiver())
            self._service = await self._stack.enter_async_context(
                started(
                    *SERVICE,
                    *("--otlp-endpoint", self._collector.endpoint),
                    environment=_ENVIRONMENT,
                )
            )
            self._engine_pid = 0
        return self._service


async def _ticks(operations: OperationsClient) -> AsyncGenerator[ServerStats]:
    """Yield the service's statistics at intervals, until the time limit for becoming idle."""
    stats = operations.watch_stats(interval_s=_TICK_S, deadline_s=IDLE_S)
    with contextlib.suppress(DeadlineExceeded):
        async with contextlib.aclosing(stats):
            async for each in stats:
                yield each


async def _why_busy(operations: OperationsClient, client: Client) -> str:
    """Return what prevents the next scenario; "" if nothing does. Raises PenstockError, except
    QueueFull.
    """
    if num_left := len(await operations.list_requests()):
        return f"{num_left} of its requests still live on the server"
    request_id = f"{DRIVER_PREFIX}{uuid.uuid4()}"
    try:
        await client.generate_once([1], max_tokens=1, deadline_s=IDLE_S, request_id=request_id)
    except QueueFull:
        # A queue that was full counts as full until the engine reports otherwise.
        return "its queue still counts as full"
    return ""
