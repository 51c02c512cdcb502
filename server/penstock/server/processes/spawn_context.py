"""The resources with which the supervisor starts processes: module, descriptors, environment.

Owns the settings that libraries read only from the environment, and only when they load. Variables
that the operator has set are kept, except where an option of ours replaces them.
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
    """Resources that outlive any process of the service.

    `config`: the settings in force, with the resolved port. `socket_path`: the engine's socket;
    `listener_fd`: its listening socket. `observer_path`: the observer's socket, None without an
    observer. `flight_fd`: the flight recorder's memory, -1 without one. `board_fd`, `beats_fd`: see
    `penstock.server.link.board`. `started_s`: when the service started, monotonic clock.
    """

    config: ServerConfig
    socket_path: Path
    listener_fd: int
    observer_path: Path | None
    flight_fd: int
    board_fd: int
    beats_fd: int
    started_s: float


_QUIET_CORE: Final = {"GRPC_VERBOSITY": "NONE"}
"""gRPC's core writes to stderr directly, a line for each failed handshake and, even at ERROR, for
each unknown service name, without format or rate limit. We log the outcome of calls ourselves.
"""


def engine_environment(
    executor: ExecutorConfig, *, num_cores: int, num_fronts: int
) -> dict[str, str]:
    """Return the engine's environment: no downloads, and threads only for the cores that fronts
    leave.
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
        # The plan follows the operator's variables: torch must not read a blank one.
        plan = plan_threads(
            num_cores=num_cores,
            num_fronts=num_fronts,
            num_threads=executor.num_threads,
            environ=os.environ,
        )
        wanted |= plan.environment
    return wanted


def front_environment() -> dict[str, str]:
    """Return a front's environment: one core, so that its tokenizer starts no threads."""
    return _unless_set({"TOKENIZERS_PARALLELISM": "false", **_QUIET_CORE})


def observer_environment(tracing: TracingConfig) -> dict[str, str]:
    """Return the observer's environment: where to send traces; settings take precedence over
    variables.
    """
    wanted = _unless_set(_QUIET_CORE)
    if tracing.otlp_endpoint is None:
        return wanted
    return {
        **wanted,
        "OTEL_EXPORTER_OTLP_ENDPOINT": tracing.otlp_endpoint,
        # A blank variable counts as unset: the exporter would use it, without the path for HTTP.
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
    }


def _unless_set(wanted: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}
