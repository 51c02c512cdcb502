"""Which models the fused path serves on a CPU; the eager path serves all others."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cpu.fused_path import WeightsReleased, fused_path
from penstock.executor.torch.cpu_kernels import kernels as kernels_module
from penstock.executor.torch.cpu_kernels.kernels import AUTO, PLAIN, load
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.plain import PlainKernels
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.loading import load_configured
from penstock.executor.torch.module_tree import NotFused
from support.torch_differential import FEATURE_SETS, NUM_SLOTS, check_feature_set, prompt_error
from support.torch_models import (
    FUSED_SHAPES,
    HIDDEN_DIFFERENCES,
    NaiveModel,
    save_tiny_model,
)


@pytest.mark.parametrize(
    ("name", "dtype", "reason"), [("gemma2", "auto", "cap"), ("llama", "float16", "float16")]
)
def test_a_model_that_does_not_fit_is_served_by_its_modules(
    name: str, dtype: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ExecutorConfig(model_path=save_tiny_model(name, tmp_path), dtype=dtype, num_blocks=8)

    with caplog.at_level(logging.WARNING):
        executor = create_torch_executor(config)

    assert "eager path" in executor.info.resources
    (reported,) = [record.message for record in caplog.records if "eager path" in record.message]
    assert reason in reported


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", HIDDEN_DIFFERENCES)
def test_a_model_that_computes_more_than_its_tree_is_served_by_its_modules(
    name: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if dtype != "float16" and not load().is_native:
        pytest.skip("no compiled kernels here")
    folder = save_tiny_model(name, tmp_path)
    config = ExecutorConfig(model_path=folder, dtype=dtype, num_blocks=64)

    with caplog.at_level(logging.WARNING):
        executor = create_torch_executor(config)

    (reported,) = [record.message for record in caplog.records if "eager path" in record.message]
    assert re.search("float16" if dtype == "float16" else HIDDEN_DIFFERENCES[name], reported)
    error = prompt_error(executor, NaiveModel(folder))
    assert error < {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUSED_SHAPES)
def test_the_shapes_that_are_known_are_fused(name: str, dtype: str, tmp_path: Path) -> None:
    config = ExecutorConfig(model_path=save_tiny_model(name, tmp_path), dtype=dtype, num_blocks=8)

    assert fused_path(config, load_configured(config), load()).name == "fused"


def test_differences_that_the_module_tree_hides_are_found_in_the_logits(tmp_path: Path) -> None:
    config = ExecutorConfig(model_path=save_tiny_model("llama", tmp_path), num_blocks=8)
    model = load_configured(config)
    module: Any = model.module
    module.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out * 1.5)

    with pytest.raises(NotFused, match="differ"):
        fused_path(config, model, load())

    # The modules still compute: nothing was taken from them.
    ids = torch.arange(5)
    assert torch.isfinite(model.logits(ids[None], ids[None], ids)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_only_the_modules_read_are_freed(dtype: str, tmp_path: Path) -> None:
    config = ExecutorConfig(model_path=save_tiny_model("qwen2", tmp_path), dtype=dtype)
    model = load_configured(config)

    path = fused_path(config, model, load())

    layer: Any = model.module.get_submodule("model.layers.0")
    assert layer.mlp.down_proj.weight.shape == (64, 96)
    assert layer.mlp.down_proj.weight.untyped_storage().nbytes() == model.dtype.itemsize
    assert path.num_weight_bytes > 96 * 64 * model.dtype.itemsize


class _Faulty(PlainKernels):
    """Kernels whose bfloat16 matrix product is wrong by a factor of 1.5."""

    is_native = True
    has_fast_bf16_linear = True

    def bf16_linear(self, x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor) -> None:
        super().bf16_linear(x, matrix, out)
        out *= 1.5


def test_a_packed_product_that_is_wrong_is_found_and_the_model_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    config = ExecutorConfig(model_path=folder, dtype="bfloat16", num_blocks=8)
    monkeypatch.setattr(kernels_module, "load", _Faulty)

    with caplog.at_level(logging.WARNING):
        executor = create_torch_executor(config)

    (reported,) = [record.message for record in caplog.records if "eager path" in record.message]
    assert "differ" in reported
    assert executor.info.resources == TorchExecutor(config).info.resources


def test_a_width_that_cannot_be_packed_is_found_while_the_modules_have_their_weights(
    tmp_path: Path,
) -> None:
    folder = save_tiny_model("llama", tmp_path, intermediate_size=95)
    config = ExecutorConfig(model_path=folder, dtype="bfloat16", num_blocks=8)

    with pytest.raises(NotFused, match="a product of 95 inputs") as raised:
        fused_path(config, load_configured(config), _Faulty())

    assert not isinstance(raised.value, WeightsReleased)


def test_kernels_in_plain_torch_equal_a_full_forward(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path)

    def build(num_blocks: int) -> TorchExecutor:
        config = ExecutorConfig(model_path=folder, max_num_seqs=NUM_SLOTS, num_blocks=num_blocks)
        model = load_configured(config)
        return TorchExecutor(config, model, fused_path(config, model, load(PLAIN)))

    check_feature_set(FEATURE_SETS[-1], build, NaiveModel(folder))


def test_without_compiled_kernels_the_modules_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_module, "_chosen", AUTO)  # restored after the test
    folder = save_tiny_model("llama", tmp_path)
    config = ExecutorConfig(model_path=folder, num_blocks=8, cpu_kernels=PLAIN)

    with caplog.at_level(logging.WARNING):
        executor = create_torch_executor(config)

    assert "eager path" in executor.info.resources
    assert "its kernels are not compiled here" in caplog.text
