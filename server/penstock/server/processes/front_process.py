"""Runs a front (gRPC server process): one gRPC server on uvloop, connected to the engine.

Creates the components of the process and shuts them down. Writes heartbeats, from which the
supervisor detects a hang. If there is an observer, reports the state and the requests of the front
to it. The supervisor runs this module as
`python -m penstock.server.processes.front_process <control fd>`.
"""

import asyncio
import dataclasses
import gc
import logging
import os
import resource
import sys
from functools import partial

import uvloop

from penstock.scheduler.quotas import TenantQuota
from penstock.server.config import FrontLaunch, ServerConfig
from penstock.server.front.admission_estimate import AdmissionEstimate
from penstock.server.front.prompt_tokens import TextQuotas
from penstock.server.front.spare_memory import map_large_blocks_separately
from penstock.server.gateways import NO_GATEWAY, load_gateway
from penstock.server.ipc.board import BoardView, LivenessWriter
from penstock.server.ipc.unix_port import UnixEnginePort
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.processes.control import ChildControl, begin
from penstock.server.processes.exit_codes import EXIT_CANNOT_START, EXIT_OK
from penstock.server.processes.front_reporter import FrontReporter
from penstock.server.processes.hang_watch import NUM_CHECKS
from penstock.server.processes.orphans import end_marked
from penstock.server.rpc.gateway_service import GatewayServiceMaker
from penstock.server.rpc.options import keepalive_of
from penstock.server.rpc.server import FrontServer
from penstock.server.security.security import Security
from penstock.server.text.model_text import ModelText

# When run as a program, `__name__` would be `__main__`.
logger = logging.getLogger("penstock.server.processes.front_process")
MAX_OPEN_FILES = 65_536
"""The limit of open files and sockets that a front requests. It needs one for each connection."""
_HEARTBEATS_PER_CHECK = 4
"""Heartbeats between two checks of the supervisor, so that each check finds a new heartbeat."""


def main(arguments: list[str]) -> int:
    """Serve until the supervisor stops this process, then drain, and return the exit code."""
    # Without a supervisor the engine is killed immediately and cannot end its own child processes.
    control, launch = begin(arguments, FrontLaunch, "front", before_exit=end_marked)
    allow_many_descriptors()
    map_large_blocks_separately()
    logger.debug("front id %d", launch.front_id)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(control, launch))


async def _serve(control: ChildControl, launch: FrontLaunch) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    control.on_stop(lambda: loop.call_soon_threadsafe(stop.set))
    config = launch.server
    port = UnixEnginePort(launch.socket_path, launch.front_id)
    reporter = None
    if launch.observer_path is not None:
        reporter = FrontReporter(launch.observer_path, launch.front_id)
    try:
        text = ModelText.load(
            config.tokenizer_path or config.model_path,
            name=config.model,
            max_bytes_per_tenant=config.front.max_text_bytes_per_tenant,
        )
        security = _security(launch.server)
        board = BoardView.from_fd(launch.board_fd)
        recorder = None if reporter is None else reporter.recorder
        server = _server(launch, text, port, security, recorder, _gateway(config, board))
        server.front.admission = AdmissionEstimate(
            board,
            config.num_fronts,
            waiting=server.front.table,
            weight_of=partial(_weight_of, security, config),
        )
        server.front.prompts.quotas = TextQuotas(partial(_quota_of, security, config))
        host = f"[{config.host}]" if ":" in config.host else config.host
        await server.start(f"{host}:{launch.port}")
        await port.start(server)
        if reporter is not None:
            await reporter.start(server)
    except Exception as error:
        logger.debug("cannot start", exc_info=True)
        control.report_failure(error)
        return EXIT_CANNOT_START
    gc.collect()
    gc.freeze()
    liveness = _liveness_timer(launch)
    liveness.start()
    control.on_engine_lost(lambda: loop.call_soon_threadsafe(server.front.on_no_further_engine))
    ready = asyncio.create_task(_report_ready(control, port), name="report ready")
    keeping = asyncio.create_task(security.poll_periodically(), name="poll security files")
    await stop.wait()
    ready.cancel()
    keeping.cancel()
    drain_timeout_s = control.drain_timeout_s
    await server.drain(
        config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s,
        has_successor=control.has_successor,
    )
    if reporter is not None:
        await reporter.close()
    await port.close()
    text.close()
    liveness.stop()
    return EXIT_OK


def _gateway(config: ServerConfig, board: BoardView | None) -> GatewayServiceMaker | None:
    """Return the function that creates the gRPC service of the configured gateway; None without a
    gateway.

    The gateway's code is imported only if it is configured.
    """
    if config.gateway == NO_GATEWAY:
        return None
    gateway = load_gateway(config.gateway)
    return lambda front, access: gateway.make_service(front, access, board)


class _LivenessTimer:
    """Writes a heartbeat for the supervisor every `interval_s` seconds from `start` to `stop`. Does
    nothing if `writer` is None."""

    def __init__(self, writer: LivenessWriter | None, interval_s: float) -> None:
        self._writer = writer
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Write a heartbeat now and after each interval. Call this on the event loop."""
        if self._writer is None:
            return
        self._writer.heartbeat()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self.start)

    def stop(self) -> None:
        """Stop writing heartbeats. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _liveness_timer(launch: FrontLaunch) -> _LivenessTimer:
    fd, limit_s = launch.heartbeats_fd, launch.server.front_hang_s
    if fd < 0 or not limit_s:
        return _LivenessTimer(None, 0.0)
    try:
        writer = LivenessWriter(fd, launch.heartbeat_row, launch.front_id)
    finally:
        os.close(fd)
    return _LivenessTimer(writer, limit_s / (NUM_CHECKS * _HEARTBEATS_PER_CHECK))


def _weight_of(security: Security, config: ServerConfig, tenant: str) -> float:
    policy = security.policy_of(tenant)
    return config.scheduler.tenant_weights.get(tenant, 1.0) if policy is None else policy.weight


def _quota_of(security: Security, config: ServerConfig, tenant: str) -> TenantQuota:
    policy = security.policy_of(tenant)
    return config.scheduler.tenant_quota if policy is None else policy.quota


def _security(server: ServerConfig) -> Security:
    return Security(server.security, is_behind_proxy=bool(server.front.tenant_metadata_key))


def _server(
    launch: FrontLaunch,
    text: ModelText,
    port: UnixEnginePort,
    security: Security,
    recorder: RequestRecorder | None,
    gateway: GatewayServiceMaker | None,
) -> FrontServer:
    observer, front = launch.server.observer, launch.server.front
    is_tracing = recorder is not None and observer.tracing.is_on
    return FrontServer(
        text,
        dataclasses.replace(
            front,
            front_id=launch.front_id,
            has_content=is_tracing and observer.tracing.has_content,
        ),
        port=port,
        keepalive=keepalive_of(front),
        has_operations=observer.operations_port is not None,
        recorder=recorder,
        is_tracing=is_tracing,
        security=security,
        gateway=gateway,
    )


async def _report_ready(control: ChildControl, port: UnixEnginePort) -> None:
    await port.wait_up()
    control.report_ready()


def allow_many_descriptors() -> int:
    """Raise the soft limit of open files to MAX_OPEN_FILES, within the hard limit, and return the
    new limit.

    Many systems set the soft limit to 1,024, for programs that use select.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_OPEN_FILES:
        return soft
    wanted = (
        MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else max(soft, min(hard, MAX_OPEN_FILES))
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
