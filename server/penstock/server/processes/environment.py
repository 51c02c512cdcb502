"""Environment variables of the child processes.

Owns the settings that libraries read only from the environment, and only when they load. Variables
that the operator has set are kept, except where an option of ours replaces them.
"""

import os
from typing import Final

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.torch.thread_environment import plan_threads
from penstock.server.observe.config import TracingConfig

_QUIET_CORE: Final = {"GRPC_VERBOSITY": "NONE"}
"""gRPC's core writes to stderr directly, a line for each failed handshake and, even at ERROR, for
each unknown service name, without format or rate limit. We log the outcome of calls ourselves.
"""


def engine_environment(
    executor: ExecutorConfig, *, num_cores: int, num_fronts: int
) -> dict[str, str]:
    """For the engine: downloads are off, and its threads use the cores that the fronts leave."""
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
    """For a front: one core, so its tokenizer starts no threads."""
    return _unless_set({"TOKENIZERS_PARALLELISM": "false", **_QUIET_CORE})


def observer_environment(tracing: TracingConfig) -> dict[str, str]:
    """For the observer: where to send traces; settings take precedence over variables."""
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
