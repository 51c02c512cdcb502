"""Runs the observer process: exports traces, and serves metrics and the operators' API.

Creates the components of the process and shuts them down. No process that serves requests waits for
the observer. The supervisor runs this module as
`python -m penstock.server.processes.observer_process <control fd>`.
"""

import asyncio
import functools
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import uvloop

from penstock.scheduler.output_view import OutputView
from penstock.server import process_table
from penstock.server.config import ObserverLaunch
from penstock.server.gateways import NO_GATEWAY, load_gateway
from penstock.server.ipc.board import BoardView, LoadState
from penstock.server.observe.engine_client import EngineClient
from penstock.server.observe.flight_source import FlightSource
from penstock.server.observe.frames import FrontRequestView
from penstock.server.observe.front_receiver import FrontReceiver
from penstock.server.observe.listeners import ServiceListeners
from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import RequestView
from penstock.server.observe.spans.variables import unset_blank_numbers
from penstock.server.processes.command_runner import CommandRunner
from penstock.server.processes.control import ChildControl, begin, exit_at_once, in_one_line
from penstock.server.processes.exit_codes import EXIT_CANNOT_START, EXIT_OK
from penstock.server.processes.spawn_context import ENGINE_MODULE
from penstock.server.security.security import Security

if TYPE_CHECKING:
    from penstock.server.observe.metrics.service_metrics import ServiceMetrics
    from penstock.server.observe.operations.snapshots import SnapshotMaker
    from penstock.server.observe.spans.export import Tracing

# When run as a program, `__name__` would be `__main__`.
logger = logging.getLogger("penstock.server.processes.observer_process")

_END_S = 1.7
"""Default time limit of the shutdown in seconds, if the command to stop has none."""
_FINAL_READ_S = 0.5
"""How long the final messages of fronts that are ending may take, in seconds."""
_GC_THRESHOLDS = (100_000, 20, 100)
_TRACES_S = 1.0
"""How long sending the last traces may take, in seconds."""
_LEAST_TRACES_S = 0.6
"""Part of the shutdown time that is reserved for the last traces, in seconds."""
_MARGIN_S = 0.1
"""Part of the shutdown time that is reserved for everything else, in seconds."""


def main(arguments: list[str]) -> int:
    """Run the observer until the supervisor stops it, and return the exit code."""
    control, launch = begin(arguments, ObserverLaunch, "observer")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(control, launch))


async def _serve(control: ChildControl, launch: ObserverLaunch) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    control.on_stop(lambda: loop.call_soon_threadsafe(stop.set))
    try:
        observer = _Observer(control, launch)
        ports = await observer.start()
    except (Exception, SystemExit) as error:
        # Reports any failure to start, of an exporter, a library or a port.
        logger.debug("cannot start", exc_info=True)
        control.report_failure(error, "observer: ")
        return EXIT_CANNOT_START
    # Thousands of records are created and freed, and hardly any is in a reference cycle, so collect
    # cycles rarely.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    control.report_ready(**ports)
    await stop.wait()
    limit_s = control.drain_timeout_s
    await observer.stop(_END_S if limit_s is None else limit_s)
    return EXIT_OK


class _Observer:
    """Starts and stops all components of the observer. If it cannot start, the process exits."""

    def __init__(self, control: ChildControl, launch: ObserverLaunch) -> None:
        self._control = control
        self._launch = launch
        self._snapshots = _snapshots(launch)
        self._metrics: ServiceMetrics | None = None
        self._tracing: Tracing | None = None
        self._listeners = listeners = ServiceListeners(self._snapshots)
        self._receiver = FrontReceiver(listeners)
        self._engine = EngineClient(launch.socket_path, listeners.set_engine)
        self._flight: FlightSource | None = None
        if launch.flight_fd >= 0:
            self._flight = FlightSource(
                launch.flight_fd,
                listeners,
                folder=launch.server.observer.flight.folder,
                port=launch.server.port,
            )
        self._security = Security(
            launch.server.security, is_behind_proxy=bool(launch.server.front.tenant_metadata_key)
        )
        self._keeping: asyncio.Task[None] | None = None
        self._stop_servers: list[Callable[[], Awaitable[None]]] = []

    async def start(self) -> dict[str, int]:
        """Start all components, and return the ports on which they listen, keyed by `metrics_port`
        and `operations_port`."""
        launch = self._launch
        if launch.server.observer.tracing.is_on:
            from penstock.server.observe.spans.export import start_tracing

            unset_blank_numbers(os.environ)
            self._tracing = start_tracing(launch.server.observer.tracing, model=launch.server.model)
            self._listeners.add(self._tracing)
        if launch.metrics_port is not None:
            self._metrics = _metrics(launch, self._tracing, self._receiver)
            self._listeners.add(self._metrics)
        if self._flight is not None:
            self._flight.start()
        await self._receiver.start(socket.socket(fileno=launch.listener_fd))
        await self._engine.start()
        self._keeping = asyncio.create_task(
            self._security.poll_periodically(), name="poll security files"
        )
        return await self._start_servers()

    async def stop(self, limit_s: float) -> None:
        """Receive the last messages of all fronts, export the last traces and close the servers,
        within `limit_s` seconds."""
        end_s = time.monotonic() + limit_s - _MARGIN_S
        if self._keeping is not None:
            self._keeping.cancel()
        spare_s = end_s - _LEAST_TRACES_S - time.monotonic()
        await self._receiver.close(min(_FINAL_READ_S, max(0.0, spare_s)))
        if self._flight is not None:
            await self._flight.stop()
        await self._engine.close()
        ends = [stop() for stop in self._stop_servers]
        if self._tracing is not None:
            left_s = min(_TRACES_S, max(0.0, end_s - time.monotonic()))
            ends.append(asyncio.to_thread(self._tracing.close, left_s))
        for problem in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(problem, Exception):
                logger.error("shutdown of a part failed: %s", in_one_line(problem))

    async def _start_servers(self) -> dict[str, int]:
        launch, metrics = self._launch, self._metrics
        host = launch.server.observer.operations_host
        operations = self._operations()
        ports: dict[str, int] = {}
        if launch.metrics_port is not None and metrics is not None:
            from penstock.server.observe.metrics.application import LiveStatus
            from penstock.server.observe.metrics.http import MetricsServer

            page = MetricsServer(
                host=host,
                port=launch.metrics_port,
                metrics=metrics,
                status=LiveStatus(operations, asyncio.get_running_loop()),
                is_reserved=True,
                security=self._security,
            )
            page.start()
            self._stop_servers.append(functools.partial(asyncio.to_thread, page.close))
            ports["metrics_port"] = page.port
        if launch.operations_port is not None:
            from penstock.server.rpc.operations_service import OperationsServer

            server = OperationsServer(
                operations,
                host,
                launch.operations_port,
                is_port_reserved=True,
                security=self._security,
            )
            ports["operations_port"] = await server.start()
            self._stop_servers.append(server.stop)
        return ports

    def _operations(self) -> Operations:
        from penstock.server.observe.operations.snapshot import merge

        model = self._launch.server.model

        def merged(
            outputs: tuple[OutputView, ...], requests: tuple[FrontRequestView, ...]
        ) -> tuple[RequestView, ...]:
            now_s, now_unix_s = time.monotonic(), time.time()
            return merge(
                outputs,
                requests,
                model=model,
                now_s=now_s,
                to_unix_s=lambda at_s: now_unix_s + (at_s - now_s),
            )

        return Operations(
            snapshots=self._snapshots,
            fronts=self._receiver,
            engine=self._engine,
            flight=self._flight,
            merge=merged,
            execute=CommandRunner("observer").execute,
            send_to_supervisor=self._control.send,
        )


def _snapshots(launch: ObserverLaunch) -> "SnapshotMaker":
    from penstock.server.observe.operations.snapshots import SnapshotMaker

    return SnapshotMaker(
        launch.server.model,
        max_num_batched_tokens=launch.server.scheduler.max_num_batched_tokens,
        started_s=launch.started_s,
    )


def _metrics(
    launch: ObserverLaunch, tracing: "Tracing | None", receiver: FrontReceiver
) -> "ServiceMetrics":
    from penstock.server.observe.metrics.service_metrics import ServiceMetrics
    from penstock.server.rpc.service_names import REQUEST_METHODS

    def traces() -> dict[str, int]:
        return {} if tracing is None else tracing.counters()

    def processes() -> dict[str, int]:
        return processes_of_service(receiver.pids)

    board = BoardView.from_fd(launch.board_fd)

    def load() -> LoadState | None:
        return None if board is None else board.load

    gateway = launch.server.gateway
    gateway_methods = () if gateway == NO_GATEWAY else load_gateway(gateway).request_methods
    return ServiceMetrics(
        model=launch.server.model,
        tenants=launch.server.observer.metrics_tenants,
        version=_version(),
        methods=(*REQUEST_METHODS, *gateway_methods),
        trace_counts=traces,
        processes=processes,
        load=load,
    )


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return ""


def processes_of_service(front_pids: Mapping[int, int]) -> dict[str, int]:
    """Return the current process ids of the service, keyed by process name. `front_pids` has the
    process ids of the fronts (gRPC server processes), keyed by front id. The engine is included on
    Linux only."""
    pids = {"observer": os.getpid(), "supervisor": os.getppid()}
    # Numbered by age, so that the successor of a front gets its name.
    for number, front_id in enumerate(sorted(front_pids), start=1):
        pids[f"front {number}"] = front_pids[front_id]
    if process_table.is_supported():
        engine_pid = process_table.child_with_argument(os.getppid(), ENGINE_MODULE)
        if engine_pid is not None:
            pids["engine"] = engine_pid
    return pids


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
