"""One load generator process: receives plans over a pipe, runs them, sends back its record.

Owns the main loop of the process. It ends on the stop message or when the pipe closes, so that it
does not outlive its parent.
"""

import asyncio
import gc
import importlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from penstock.client.errors import PenstockError
from penstock.tools.bench.driver import Driver, Share
from penstock.tools.bench.pipe import MessagePipe
from penstock.tools.bench.plan import LoadPlan
from penstock.tools.bench.recorder import Recorder
from penstock.tools.bench.schedule import planned_requests, share_of
from penstock.tools.bench.sender import ClientSender, SenderConfig

REACH_S = 20.0
"""Time limit for a process to connect to the service."""
_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Prepare the part of `worker` of `num_workers` in this plan."""

    plan: LoadPlan
    worker: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Begin at `at_s` of CLOCK_MONOTONIC, which all processes of a machine share."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is connected to the service, or has prepared the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """The process could not connect to the service."""

    error: PenstockError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """Counts of one process since the start, including the warm-up."""

    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDone:
    """The record of one process. `cpu_share`: of one core, from start to end.

    `was_sending_at_end`: the time limit ended the sending, not the number of requests.
    """

    recorder: Recorder
    cpu_share: float
    was_sending_at_end: bool


def run_worker(connection: "Connection[Any, Any]", config: SenderConfig) -> None:
    """Run one process until its parent ends it."""
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(_work(MessagePipe(connection), config))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _work(pipe: MessagePipe, config: SenderConfig) -> None:
    async with ClientSender(config) as sender:
        try:
            await sender.reach(REACH_S)
        except PenstockError as error:
            pipe.send(Unreachable(error=error))
            return
        pipe.send(Ready())
        try:
            while isinstance(order := await pipe.receive(), Order):
                sender.begin(order.plan)
                await _carry_out(order, pipe, sender)
        except (EOFError, BrokenPipeError):
            return


async def _carry_out(order: Order, pipe: MessagePipe, sender: ClientSender) -> None:
    """Execute one run. Raises EOFError if its parent ends it early."""
    plan = order.plan
    requests = share_of(planned_requests(plan), order.worker, order.num_workers)
    pipe.send(Ready())
    start = await pipe.receive()
    if not isinstance(start, Start):
        raise EOFError
    share = Share.of(plan, order.worker, order.num_workers)
    driver = Driver(plan, share, requests, sender.generate, lambda: time.monotonic() - start.at_s)
    # Objects made so far are long-lived; repeated collections of them would delay reads.
    gc.collect()
    gc.freeze()
    cpu_s, begun_s = time.process_time(), time.monotonic()
    # During the run, the parent sends nothing: receive() returns only when the pipe is closed.
    over = asyncio.create_task(pipe.receive())
    reporting = asyncio.create_task(_send_progress(driver, pipe))
    running = asyncio.create_task(driver.run())
    try:
        await asyncio.wait((over, running, reporting), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise EOFError
        await running
    finally:
        for task in (over, reporting, running):
            task.cancel()
        await asyncio.gather(over, reporting, running, return_exceptions=True)
    pipe.send(
        WorkerDone(
            recorder=driver.recorder,
            cpu_share=(time.process_time() - cpu_s) / (time.monotonic() - begun_s),
            was_sending_at_end=driver.was_sending_at_end,
        )
    )


async def _send_progress(driver: Driver, pipe: MessagePipe) -> None:
    """Send the progress of the run; raises when the pipe is closed."""
    while True:
        await asyncio.sleep(_PROGRESS_S)
        pipe.send(
            WorkerProgress(
                num_sent=driver.num_sent,
                num_ended=driver.num_ended,
                num_failed=driver.num_failed,
            )
        )
