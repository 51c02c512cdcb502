"""Chooses the path that serves a model: the fused step if it supports the model, else the modules
of transformers.

The choice is made once, after loading, and logged as one line.
"""

import logging
from importlib.util import find_spec

import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cpu.fused_path import WeightsTaken, fused_path
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.loading import LoadedModel, load_configured
from penstock.executor.torch.module_tree import NotFused
from penstock.scheduler.executor import Executor

_log = logging.getLogger(__name__)


def create_torch_executor(config: ExecutorConfig) -> Executor:
    """Load the model and build its executor. Raises the errors of `TorchExecutor`."""
    if config.device == "cpu" and torch.cuda.is_available():
        _log.warning("device is cpu, but a CUDA device is available")
    model = load_configured(config)
    try:
        if model.device.type == "cpu":
            return TorchExecutor(config, model, fused_path(config, model))
        return _fused_on_cuda(config, model)
    except NotFused as reason:
        _refuse_eight_bit(config, reason)
        _log.warning("the eager path serves this model: %s", reason)
        is_whole = not isinstance(reason, WeightsTaken)
    # Runs after the exception is released, because its frames hold the attempt's tensors.
    return TorchExecutor(config, model if is_whole else None)


def _refuse_eight_bit(config: ExecutorConfig, reason: NotFused) -> None:
    """Raise UnsupportedModel naming the settings that only the fused path supports."""
    asked = [f"quantization {config.quantization}"] if config.quantization != "none" else []
    if config.kv_cache_dtype != "auto":
        asked.append(f"kv_cache_dtype {config.kv_cache_dtype}")
    if asked:
        raise UnsupportedModel(f"{', '.join(asked)}: the eager path serves this model: {reason}")


def _fused_on_cuda(config: ExecutorConfig, model: LoadedModel) -> Executor:
    if find_spec("triton") is None:
        raise NotFused("triton is not installed")
    # Triton is imported only where its kernels run.
    from penstock.executor.torch.cuda.device_queue import CudaQueue
    from penstock.executor.torch.cuda.fused_loading import build_fused

    return build_fused(config, model, CudaQueue(model.device))
