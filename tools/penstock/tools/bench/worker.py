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
from multiprocessing.connection import Connection
from typing import Any

from penstock.client.errors import PenstockError
from penstock.tools.bench.driver import Driver, Share
from penstock.tools.bench.pipe import (
    Connect,
    MessagePipe,
    Prepare,
    Start,
    Unreachable,
    WorkerDone,
    WorkerProgress,
    WorkerReady,
)
from penstock.tools.bench.schedule import planned_requests, share_of
from penstock.tools.bench.sender import ClientSender

CONNECT_TIMEOUT_S = 20.0
"""Time limit for a process to connect to the service, seconds."""
_PROGRESS_S = 0.25


def run_worker(connection: "Connection[Any, Any]") -> None:
    """Entry point of the process: execute runs until the parent closes the pipe."""
    # Ctrl-C is sent to every process of the terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(_work(MessagePipe(connection)))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _work(pipe: MessagePipe) -> None:
    try:
        first = await pipe.receive()
    except EOFError:
        return
    assert isinstance(first, Connect)
    async with ClientSender(first.config) as sender:
        try:
            await sender.connect(CONNECT_TIMEOUT_S)
        except PenstockError as error:
            failure = error.failure
            pipe.send(
                Unreachable(code=failure.code.name, message=failure.message, reason=failure.reason)
            )
            return
        pipe.send(WorkerReady())
        try:
            while isinstance(order := await pipe.receive(), Prepare):
                sender.set_plan(order.plan)
                await _execute_run(order, pipe, sender)
        except (EOFError, BrokenPipeError):
            return


async def _execute_run(order: Prepare, pipe: MessagePipe, sender: ClientSender) -> None:
    """Execute one run and send its record. Raises EOFError if the parent closes the pipe before the
    end.
    """
    plan = order.plan
    requests = share_of(planned_requests(plan), order.worker, order.num_workers)
    pipe.send(WorkerReady())
    start = await pipe.receive()
    if not isinstance(start, Start):
        raise EOFError
    share = Share.from_plan(plan, order.worker, order.num_workers)
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
