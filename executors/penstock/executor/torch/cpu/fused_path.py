"""Builds the fused path on a CPU from a loaded model.

`fused_path` recognises the module tree, verifies it in float32, joins its weights, compares logits
with the model's in float32, packs the weights and compares again. If any of this fails, it raises
NotFused. The eager path then serves the model, or the model is rejected if 8-bit settings are
given.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cpu.fused_forward import CpuFusedForward
from penstock.executor.torch.cpu.fused_model import (
    FusedModel,
    check_packing,
    join_model,
    num_packed_bytes,
    pack_model,
)
from penstock.executor.torch.cpu_kernels import kernels as kernel_module
from penstock.executor.torch.cpu_kernels.kernels import Kernels
from penstock.executor.torch.cpu_kernels.native import INT8_DIM_STEP
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.kv_pages import KVPages, page_dtype
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.module_tree import NotFused, read_module_tree
from penstock.executor.torch.resources import weight_bytes
from penstock.executor.torch.serving_info import served_length
from penstock.executor.torch.step_forward import ForwardPath
from penstock.executor.torch.step_inputs import Ints
from penstock.executor.torch.trial_reference import make_reference
from penstock.executor.torch.whole_sequence import (
    NUM_CHUNK_TOKENS,
    NUM_TRIAL_TOKENS,
    trial_arrays,
    trial_batch,
)

logger = logging.getLogger(__name__)


class WeightsReleased(NotFused):
    """Like NotFused, but the modules have released their weights, so the model must be loaded
    again.
    """


@torch.inference_mode()
def fused_path(
    config: ExecutorConfig, model: LoadedModel, kernels: Kernels | None = None
) -> ForwardPath:
    """Return the fused path, with `kernels` or, by default, the compiled kernels.

    Raises NotFused with the reason if the fused step does not support the model, or if it would be
    slower than the modules because compiled kernels are missing; WeightsReleased if this is found
    after packing; UnsupportedModel for a head size that int8 pages do not support; and the
    ValueError of `kernels.load`.
    """
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise NotFused(f"weights of {model.dtype}")
    tree = read_module_tree(model)
    if kernels is None:
        kernels = kernel_module.load()
        if not kernels.is_native:
            raise NotFused("its kernels are not compiled here")
    is_int8 = config.quantization == "int8"
    check_packing(tree, kernels, is_int8=is_int8)
    reference = make_reference(model, tree, NUM_TRIAL_TOKENS)
    num_weight_bytes = weight_bytes(model)
    num_positions = max(served_length(config, model), NUM_TRIAL_TOKENS) + 1

    def trial(fused: FusedModel, kv_dtype: torch.dtype) -> Tensor:
        return _trial_logits(fused, kernels, model, config.block_size, kv_dtype)

    kv_dtype = page_dtype(config.kv_cache_dtype, model.dtype)
    _check_head_size(tree.head_dim, kv_dtype, kernels)
    try:
        joined = join_model(tree, num_positions=num_positions)
        found = trial(joined, model.dtype)
    except (
        Exception
    ) as failure:  # a shape that a kernel does not support, or a build that lacks one
        raise NotFused(f"its kernels do not run here: {failure}") from failure
    if fault := reference.fault_of(found, model.dtype):
        raise NotFused(fault)
    try:
        fused = pack_model(joined, tree, kernels, is_int8=is_int8)
        found = trial(fused, kv_dtype)
    except Exception as failure:
        raise WeightsReleased(f"its kernels do not run here: {failure}") from failure
    if fault := reference.fault_of(found, torch.int8 if is_int8 else kv_dtype):
        raise WeightsReleased(fault)
    logger.debug(
        "the fused path serves this model with %s kernels: its logits differ from the model's in"
        " float32 by %.1e",
        kernels.instructions,
        reference.error_of(found),
    )
    if is_int8:
        num_weight_bytes = weight_bytes(model) + num_packed_bytes(fused)
    return ForwardPath(
        name="fused",
        num_weight_bytes=num_weight_bytes,
        quantization=config.quantization,
        kv_dtype=kv_dtype,
        make=lambda pages: CpuFusedForward(fused, kernels, pages),
    )


def _check_head_size(head_dim: int, kv_dtype: torch.dtype, kernels: Kernels) -> None:
    if kernels.is_native and kv_dtype is torch.int8 and head_dim % INT8_DIM_STEP:
        raise UnsupportedModel(
            f"kv_cache_dtype int8 needs heads of a multiple of {INT8_DIM_STEP} elements, not"
            f" {head_dim}"
        )


def _trial_logits(
    fused: FusedModel,
    kernels: Kernels,
    model: LoadedModel,
    block_size: int,
    kv_dtype: torch.dtype,
) -> Tensor:
    """Run the trial tokens, first a chunk and then single tokens; return their logits
    [NUM_TRIAL_TOKENS, vocabulary].
    """
    num_blocks = -(-NUM_TRIAL_TOKENS // block_size)
    pages = KVPages(
        model.shapes,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=kv_dtype,
        device=model.device,
    )
    arrays = trial_arrays(fused.embedding, NUM_TRIAL_TOKENS, block_size)
    forward = CpuFusedForward(fused, kernels, pages)
    steps = [
        (0, NUM_CHUNK_TOKENS),
        *((at, 1) for at in range(NUM_CHUNK_TOKENS, NUM_TRIAL_TOKENS)),
    ]
    return torch.cat(
        [
            forward.run(trial_batch(arrays, start, count), _all_indices).logits
            for start, count in steps
        ]
    )


def _all_indices(last_of_row: Ints) -> Ints:
    """Return the indices of all packed tokens."""
    return np.arange(last_of_row[-1] + 1)
