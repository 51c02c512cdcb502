"""Creates executors. Only this module refers to all executors; it imports only the requested
one.
"""

import logging
from importlib.util import find_spec

from penstock.conventions.extras import requires_extra
from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.unavailable import ExecutorUnavailable
from penstock.scheduler.executor import Executor

logger = logging.getLogger(__name__)


def create_executor(config: ExecutorConfig) -> Executor:
    """Build the executor of kind `config.kind`: load its model and allocate its memory.

    Raises ExecutorUnavailable if an optional dependency cannot be used, and the errors of the
    executor's constructor.
    """
    require_installed(config.kind)
    # Imported here: the executor's packages may take seconds to import.
    logger.info("loading the %s executor", config.kind)
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
    """Raise ExecutorUnavailable, naming the package to install, if a dependency of `kind` is
    missing.

    Packages are located, not imported, because an import takes seconds.
    """
    match kind:
        case ExecutorKind.SIMULATED:
            pass
        case ExecutorKind.TORCH:
            for name in ("torch", "transformers"):
                if find_spec(name) is None:
                    raise ExecutorUnavailable(f"the torch executor {requires_extra('torch', name)}")
        case ExecutorKind.TRTLLM:
            if find_spec("tensorrt_llm") is None:
                from penstock.executor.trtllm.package import MISSING

                raise ExecutorUnavailable(MISSING)
