"""Creates executors; the only module that knows all of them. Imports only the requested one."""

import logging
from importlib.util import find_spec

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.unavailable import ExecutorUnavailable
from penstock.scheduler.executor import Executor

_log = logging.getLogger(__name__)


def create_executor(config: ExecutorConfig) -> Executor:
    """Build the executor that `config.kind` names: loads its model and allocates its memory.

    Raises ExecutorUnavailable when an optional dependency is missing.
    """
    require_installed(config.kind)
    # Imported here: the executor's packages may take seconds to import.
    _log.info("loading the %s executor", config.kind)
    match config.kind:
        case ExecutorKind.SIMULATED:
            from penstock.executor.simulated.executor import SimulatedExecutor

            return SimulatedExecutor(config)
        case ExecutorKind.TORCH:
            from penstock.executor.torch.create import create_torch_executor

            return create_torch_executor(config)
        case ExecutorKind.TRTLLM:
            from penstock.executor.trtllm.executor import TrtllmExecutor

            return TrtllmExecutor(config)


def require_installed(kind: ExecutorKind) -> None:
    """Raise ExecutorUnavailable, naming what to install, when a dependency of `kind` is missing.

    Packages are located, not imported: importing takes seconds, which executors overlap with other
    work.
    """
    match kind:
        case ExecutorKind.SIMULATED:
            pass
        case ExecutorKind.TORCH:
            for name in ("torch", "transformers"):
                if find_spec(name) is None:
                    raise ExecutorUnavailable(
                        f"the torch executor needs {name}: install penstock[torch]"
                    )
        case ExecutorKind.TRTLLM:
            if find_spec("tensorrt_llm") is None:
                from penstock.executor.trtllm.package import MISSING

                raise ExecutorUnavailable(MISSING)
