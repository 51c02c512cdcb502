"""Creates the torch executor on a CPU with its eager or its fused path."""

from __future__ import annotations

from typing import Literal

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cpu.fused_path import fused_path
from penstock.executor.torch.cpu_kernels.kernels import load
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.loading import LoadedModel, load_configured
from penstock.executor.torch.step_forward import ForwardPath

PathName = Literal["eager", "fused"]
PATHS: tuple[PathName, ...] = ("eager", "fused")


def build_by(path: PathName, config: ExecutorConfig) -> TorchExecutor:
    """Return an executor that uses exactly this path, with the kernels that are available."""
    if path == "eager":
        return TorchExecutor(config)
    model = load_configured(config)
    return TorchExecutor(config, model, fused_of(config, model))


def fused_of(config: ExecutorConfig, model: LoadedModel) -> ForwardPath:
    return fused_path(config, model, load())
