"""One process of the load generator: receives plans over a pipe, executes its part of each and
sends back a record.

It exits when the pipe closes, so it does not outlive its parent.
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
from penstock.tools.bench.recorder import LoadRecorder
from penstock.tools.bench.schedule import planned_requests, share_of
from penstock.tools.bench.sender import ClientSender, SenderConfig

REACH_S = 20.0
"""Time limit for a process to connect to the service, seconds."""
_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """A command to prepare the part of this plan that process `worker` (from 0) of `num_workers`
    executes.
    """

    plan: LoadPlan
    worker: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command to begin the prepared run when the monotonic clock, which all processes of a
    machine share, is at `at_s`.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Reports that the process is connected to the service or, after Prepare, ready for Start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """Reports that the process could not connect to the service, and exits."""

    error: PenstockError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """The counts of one process since the start, including the warm-up."""

    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDone:
    """The record of one process. `cpu_share`: its CPU time during the run, as a share of one core.
    `was_sending_at_end`: as in `Driver`.
    """

    recorder: LoadRecorder
    cpu_share: float
    was_sending_at_end: bool


def run_worker(connection: "Connection[Any, Any]", config: SenderConfig) -> None:
    """Entry point of the process: execute runs until the parent closes the pipe."""
    # Ctrl-C is sent to every process of the terminal; the parent handles it.
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
        pipe.send(WorkerReady())
        try:
            while isinstance(order := await pipe.receive(), Prepare):
                sender.begin(order.plan)
                await _carry_out(order, pipe, sender)
        except (EOFError, BrokenPipeError):
            return


async def _carry_out(order: Prepare, pipe: MessagePipe, sender: ClientSender) -> None:
    """Execute one run and send its record. Raises EOFError if the parent closes the pipe before the
    end.
    """
    plan = order.plan
    requests = share_of(planned_requests(plan), order.worker, order.num_workers)
    pipe.send(WorkerReady())
    start = await pipe.receive()
    if not isinstance(start, Start):
        raise EOFError
    share = Share.of(plan, order.worker, order.num_workers)
    driver = Driver(plan, share, requests, sender.generate, lambda: time.monotonic() - start.at_s)
    # Existing objects are long-lived; repeated garbage collection of them would delay reads.
    gc.collect()
    gc.freeze()
    cpu_s, begun_s = time.process_time(), time.monotonic()
    # The parent sends no message during the run, so receive() returns only when the pipe is closed.
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
    """Send the progress of the run to the parent every 0.25 s, until cancelled; raises OSError when
    the pipe is closed.
    """
    while True:
        await asyncio.sleep(_PROGRESS_S)
        pipe.send(
            WorkerProgress(
                num_sent=driver.num_sent,
                num_ended=driver.num_ended,
                num_failed=driver.num_failed,
            )
        )
