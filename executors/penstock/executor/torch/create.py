"""Selects how a model is computed: by the fused step (Penstock's kernels for decoders like Llama)
if it supports the model, else by the modules of transformers (the eager path).

The choice is made once, after loading, and logged.
"""

import logging
from dataclasses import replace
from importlib.util import find_spec

import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cpu.fused_path import WeightsReleased, fused_path
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.loading import LoadedModel, load_configured
from penstock.executor.torch.module_tree import NotFused
from penstock.scheduler.executor import Executor

logger = logging.getLogger(__name__)


def create_torch_executor(config: ExecutorConfig) -> Executor:
    """Load the configured model and return an executor for it, on the fused or the eager path.
    Raises the same errors as `TorchExecutor`.
    """
    if config.device == "cpu" and torch.cuda.is_available():
        logger.warning("device is cpu, but a CUDA device is available")
    model = load_configured(config)
    try:
        if model.device.type == "cpu":
            return TorchExecutor(config, model, fused_path(config, model))
        # With the index, for messages.
        config = replace(config, device=str(model.device))
        return _fused_on_cuda(config, model)
    except NotFused as reason:
        _reject_eight_bit(config, reason)
        logger.warning("the eager path serves this model: %s", reason)
        has_weights = not isinstance(reason, WeightsReleased)
    # Outside the `except` block, so that the exception, whose frames hold the attempt's tensors, is
    # released first.
    return TorchExecutor(config, model if has_weights else None)


def _reject_eight_bit(config: ExecutorConfig, reason: NotFused) -> None:
    """Raise UnsupportedModel if 8-bit settings are given, because only the fused path supports
    them. `reason`: why the fused path does not serve the model.
    """
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
