"""The embedded executor on a CPU by either of its paths."""

from __future__ import annotations

from typing import Literal

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.executor import TorchExecutor

PathName = Literal["eager", "fused"]
PATHS: tuple[PathName, ...] = ("eager", "fused")


def build_by(path: PathName, config: ExecutorConfig) -> TorchExecutor:
    """An executor of that path and no other."""
    if path == "eager":
        return TorchExecutor(config)
    executor = create_torch_executor(config)
    assert isinstance(executor, TorchExecutor)
    assert "fused path" in executor.info.resources
    return executor
