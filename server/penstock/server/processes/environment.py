"""What child processes find in their environment.

Owns the settings that libraries read only there, and only when they load. What the operator has
set already stays, but for variables that an option of ours stands in for.
"""

import os
from typing import Final

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.torch.thread_environment import plan_threads
from penstock.server.observe.config import TracingConfig

_QUIET_CORE: Final = {"GRPC_VERBOSITY": "NONE"}
"""gRPC's core writes to stderr by itself, a line for each handshake that fails and, even at ERROR,
for each name that a stranger makes up: no form and no rate is asked of it. What becomes of a call
we log."""


def engine_environment(
    executor: ExecutorConfig, *, num_cores: int, num_fronts: int
) -> dict[str, str]:
    """For the engine: nothing is downloaded, and its threads take the cores that fronts leave."""
    wanted: dict[str, str] = {}
    if executor.kind is not ExecutorKind.SIMULATED:
        wanted = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
    if executor.kind is ExecutorKind.TORCH:
        plan = plan_threads(
            num_cores=num_cores, num_fronts=num_fronts, num_threads=executor.num_threads
        )
        wanted |= plan.environment
    return _unless_set(wanted)


def front_environment() -> dict[str, str]:
    """For a front: one core each, so its tokenizer starts no threads of its own."""
    return _unless_set({"TOKENIZERS_PARALLELISM": "false", **_QUIET_CORE})


def observer_environment(tracing: TracingConfig) -> dict[str, str]:
    """For the observer: where traces go, if a setting says so, whatever the variables say."""
    wanted = _unless_set(_QUIET_CORE)
    if tracing.otlp_endpoint is None:
        return wanted
    return {
        **wanted,
        "OTEL_EXPORTER_OTLP_ENDPOINT": tracing.otlp_endpoint,
        # Blank is unset: it would be preferred, and over HTTP nothing is appended to its path.
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
    }


def _unless_set(wanted: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}
