"""Defines the resources with which the supervisor starts processes: modules, descriptors and
environment variables.

Contains the settings that libraries read only from the environment, and only when they load.
Variables that the operator has set are kept, except where an option of Penstock replaces them.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.torch.thread_environment import plan_threads
from penstock.server.config import ServerConfig
from penstock.server.observe.config import TracingConfig

ENGINE_MODULE = "penstock.server.processes.engine_process"
FRONT_MODULE = "penstock.server.processes.front_process"
OBSERVER_MODULE = "penstock.server.processes.observer_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnContext:
    """Resources that exist as long as the service, for all its processes.

    Attributes:
        config: The current settings, with the actual port.
        socket_path: The Unix socket of the engine.
        listener_fd: The listening socket of the engine.
        observer_path: The Unix socket of the observer, None without an observer.
        flight_fd: Descriptor of the flight recorder's memory, -1 without a recorder.
        board_fd, heartbeats_fd: Descriptors of the engine's status board and of the fronts'
            heartbeats, see `penstock.server.ipc.board`.
        started_s: Start of the service in seconds on the monotonic clock.
    """

    config: ServerConfig
    socket_path: Path
    listener_fd: int
    observer_path: Path | None
    flight_fd: int
    board_fd: int
    heartbeats_fd: int
    started_s: float


_QUIET_CORE: Final = {"GRPC_VERBOSITY": "NONE"}
"""gRPC's core writes to stderr directly, without format or rate limit: a line for each failed
handshake and, even at level ERROR, for each unknown service name. Penstock logs the outcome of
calls itself."""


def engine_environment(
    executor: ExecutorConfig, *, num_cores: int, num_fronts: int
) -> dict[str, str]:
    """Return the additional environment variables of the engine.

    They disable downloads of models, and limit the threads of a torch executor to the cores that
    the fronts (gRPC server processes) do not use.
    """
    wanted: dict[str, str] = {}
    if executor.kind is not ExecutorKind.SIMULATED:
        wanted = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
    wanted = _unless_set(wanted)
    if executor.kind is ExecutorKind.TORCH:
        # The operator's variables take precedence. A blank one is removed, because torch must not
        # read it.
        plan = plan_threads(
            num_cores=num_cores,
            num_fronts=num_fronts,
            num_threads=executor.num_threads,
            environ=os.environ,
        )
        wanted |= plan.environment
    return wanted


def front_environment() -> dict[str, str]:
    """Return the additional environment variables of a front. They keep the tokenizer library from
    starting threads, and gRPC's core from logging."""
    return _unless_set({"TOKENIZERS_PARALLELISM": "false", **_QUIET_CORE})


def observer_environment(tracing: TracingConfig) -> dict[str, str]:
    """Return the additional environment variables of the observer.

    They keep gRPC's core from logging, and set the destination of traces if it is configured; it
    then overrides variables of the operator.
    """
    wanted = _unless_set(_QUIET_CORE)
    if tracing.otlp_endpoint is None:
        return wanted
    return {
        **wanted,
        "OTEL_EXPORTER_OTLP_ENDPOINT": tracing.otlp_endpoint,
        # A blank variable is treated as unset, because the exporter would use it, without the path
        # for HTTP.
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
    }


def _unless_set(wanted: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}
