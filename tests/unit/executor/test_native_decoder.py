"""One native call that computes all layers returns the same bits as a call per operator."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import numpy as np
import torch

from penstock.executor.config import INSTRUCTION_SETS, ExecutorConfig
from penstock.executor.torch.cpu.fused_forward import CpuFusedForward
from penstock.executor.torch.cpu.fused_model import join_model, pack_model
from penstock.executor.torch.cpu.fused_path import fused_path
from penstock.executor.torch.cpu.step_threads import StepThreads
from penstock.executor.torch.cpu_kernels.kernels import load
from penstock.executor.torch.cpu_kernels.native import NativeKernels, is_supported
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.loading import load_configured
from penstock.executor.torch.module_tree import read_module_tree
from penstock.executor.torch.prepacked_linear import uses_compiled_bf16
from penstock.scheduler.batch import Batch
from penstock.scheduler.slot_arrays import SlotArrays
from support.batches import batch_of
from support.torch_differential import FEATURE_SETS, NUM_SLOTS, check_feature_set
from support.torch_models import NaiveModel, save_tiny_model

_BLOCK = 16
_LENGTHS = (1, 40, 23, 7)
ROUNDING = 0.3
"""Tolerance of a bfloat16 logit, in standard deviations; a wrong page differs by several."""


NAMES = ["llama", pytest.param("qwen3", marks=pytest.mark.nightly)]


def _batch(counts: tuple[int, ...], starts: tuple[int, ...]) -> Batch:
    arrays = SlotArrays(num_slots=len(counts), max_seq_len=64, block_size=_BLOCK)
    random = np.random.default_rng(0)
    arrays.token_ids[:] = random.integers(3, 90, arrays.token_ids.shape)
    arrays.block_table[:] = np.arange(arrays.block_table.size).reshape(arrays.block_table.shape)
    rows = list(zip(range(len(counts)), starts, counts, strict=True))
    return batch_of(arrays, rows, num_decodes=0)


@pytest.mark.parametrize("instructions", [*filter(is_supported, INSTRUCTION_SETS)])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("is_int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_operator_by_operator(
    name: str, is_int8: bool, num_threads: int, instructions: str, tmp_path: Path
) -> None:
    kernels = load(instructions)
    if not (is_int8 or uses_compiled_bf16(kernels)):
        pytest.skip("its products are oneDNN's")
    config = ExecutorConfig(model_path=save_tiny_model(name, tmp_path), dtype="bfloat16")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = [_logits(config, instructions, is_int8=is_int8, whole=w) for w in (True, False)]
    finally:
        torch.set_num_threads(before)

    assert torch.equal(*found)


@pytest.mark.parametrize("instructions", [*filter(is_supported, INSTRUCTION_SETS)])
@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16_each_token_is_the_likeliest_of_a_full_forward_but_for_rounding(
    name: str, instructions: str, tmp_path: Path
) -> None:
    kernels = load(instructions)
    if not uses_compiled_bf16(kernels):
        pytest.skip("its products are oneDNN's")
    folder = save_tiny_model(name, tmp_path, dtype=torch.bfloat16)

    def build(num_blocks: int) -> TorchExecutor:
        config = ExecutorConfig(model_path=folder, max_num_seqs=NUM_SLOTS, num_blocks=num_blocks)
        model = load_configured(config)
        executor = TorchExecutor(config, model, fused_path(config, model, kernels))
        assert isinstance(executor._forward, CpuFusedForward)
        assert executor._forward._decoder is not None
        return executor

    check_feature_set(FEATURE_SETS[-1], build, NaiveModel(folder, tolerance=ROUNDING))


@torch.inference_mode()
def _logits(
    config: ExecutorConfig, instructions: str, *, is_int8: bool, whole: bool
) -> torch.Tensor:
    """Return the logits after a first chunk and after one further token of each sequence. If
    `whole`, one native call computes all layers.
    """
    kernels = load(instructions)
    assert isinstance(kernels, NativeKernels)
    model = load_configured(config)
    tree = read_module_tree(model)
    fused = pack_model(join_model(tree, num_positions=64), tree, kernels, is_int8=is_int8)
    pages = KVPages(
        model.shapes, num_blocks=16, block_size=_BLOCK, dtype=model.dtype, device=model.device
    )
    forward = CpuFusedForward(fused, kernels, pages)
    forward._threads = StepThreads(lambda: 0.0)  # every layer by all threads
    assert forward._decoder is not None
    if not whole:
        forward._decoder = None
    steps = [_batch(_LENGTHS, (0,) * len(_LENGTHS)), _batch((1,) * len(_LENGTHS), _LENGTHS)]
    return torch.cat([forward.run(step, lambda last: last).logits for step in steps])
