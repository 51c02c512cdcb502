"""The choice of an executor: the one place that knows them all; it imports only the one chosen."""

from importlib.util import find_spec

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.scheduler.executor import Executor


class ExecutorUnavailable(Exception):
    """This installation lacks what the executor needs; the message names the extra to install."""


def create_executor(config: ExecutorConfig) -> Executor:
    """Build the executor that `config.kind` names: this loads its model and takes its memory.

    Raises ExecutorUnavailable when an optional dependency is missing.
    """
    match config.kind:
        case ExecutorKind.SIMULATED:
            from penstock.executor.simulated.executor import SimulatedExecutor

            return SimulatedExecutor(config)
        case ExecutorKind.TORCH:
            _require_torch()
            from penstock.executor.torch.executor import TorchExecutor

            return TorchExecutor(config)


def _require_torch() -> None:
    # Found, not imported: the executor overlaps these imports with other work.
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise ExecutorUnavailable(f"the torch executor needs {name}: install penstock[torch]")
