"""8-bit models on a CPU: how far they differ from float32, how much memory they take, and which are
rejected.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch
from torch import Tensor

from penstock.executor.config import ExecutorConfig
from penstock.executor.models import resolve_model
from penstock.executor.torch.cpu_kernels.kernels import load
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.loading import load_configured
from penstock.scheduler.slot_arrays import SlotArrays
from support.batches import batch_of
from support.torch_models import save_tiny_model
from unit.executor.torch_paths import fused_of

PLAY = """ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
Who is already sick and pale with grief,
That thou her maid art far more fair than she:
Be not her maid, since she is envious;
Her vestal livery is but sick and green
And none but fools do wear it; cast it off.
It is my lady, O, it is my love!
O, that she knew she were!
She speaks yet she says nothing: what of that?
Her eye discourses; I will answer it.
I am too bold, 'tis not to me she speaks.
"""
BLOCK_SIZE = 16


def demo(quantization: str, kv_cache_dtype: str, dtype: str = "float32") -> ExecutorConfig:
    return ExecutorConfig(
        model_path=resolve_model("demo"),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=32,
    )


@torch.inference_mode()
def logits_of(config: ExecutorConfig, token_ids: list[int]) -> Tensor:
    """Return float32 logits [tokens, vocabulary]. The first 100 tokens are computed in one chunk,
    the others one by one.
    """
    model = load_configured(config)
    path = fused_of(config, model)
    pages = KVPages(
        model.shapes,
        num_blocks=32,
        block_size=BLOCK_SIZE,
        dtype=path.kv_dtype,
        device=model.device,
    )
    forward, count = path.make(pages), len(token_ids)
    arrays = SlotArrays(num_slots=1, max_seq_len=32 * BLOCK_SIZE, block_size=BLOCK_SIZE)
    arrays.token_ids[0, :count] = token_ids
    arrays.num_tokens[0] = count
    arrays.block_table[0] = np.arange(32)
    rows = [(0, 0, 100), *((0, start, 1) for start in range(100, count))]
    steps = [
        forward.run(batch_of(arrays, [row]), lambda last: np.arange(last[-1] + 1)) for row in rows
    ]
    return torch.cat([step.logits.float() for step in steps])


def loss(logits: Tensor, token_ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])))


def test_the_demo_model_in_8_bits_is_close_to_itself_in_float32() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = Path(demo("none", "auto").model_path or "") / "tokenizer.json"
    token_ids = tokenizers.Tokenizer.from_file(str(file)).encode(PLAY).ids
    assert len(token_ids) > 150
    exact = logits_of(demo("none", "auto"), token_ids)
    bounds = {("none", "int8"): (0.005, 0.005), ("int8", "int8"): (0.03, 0.02)}
    for (quantization, kv_cache_dtype), (most_apart, most_lost) in bounds.items():
        found = logits_of(demo(quantization, kv_cache_dtype), token_ids)
        assert float((found - exact).norm() / exact.norm()) < most_apart
        assert abs(loss(found, token_ids) - loss(exact, token_ids)) < most_lost


@pytest.mark.skipif(not load().is_native, reason="no compiled kernels here")
def test_8_bits_take_the_reported_memory() -> None:
    # As many blocks as the bytes hold, not as the slots could fill.
    config = replace(demo("none", "auto"), num_blocks=None, kv_cache_bytes=1 << 20)
    wide = create_torch_executor(config).info
    config = replace(config, quantization="int8", kv_cache_dtype="int8")
    narrow = create_torch_executor(config).info

    assert (wide.quantization, wide.kv_cache_dtype) == ("none", "float32")
    assert (narrow.quantization, narrow.kv_cache_dtype) == ("int8", "int8")
    assert narrow.resources.endswith(" in int8, KV cache 1 MiB in int8")
    assert "in int8" not in wide.resources
    # Six layers, keys and values, two heads of 64 elements: of four bytes, of one and a scale.
    assert wide.num_blocks == (1 << 20) // (6 * 2 * 2 * BLOCK_SIZE * 256)
    assert narrow.num_blocks == (1 << 20) // (6 * 2 * 2 * BLOCK_SIZE * 68)


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_a_model_that_its_modules_serve_is_rejected_in_8_bits(setting: str, tmp_path: Path) -> None:
    config = ExecutorConfig(model_path=save_tiny_model("gemma2", tmp_path), num_blocks=8)
    asked: dict[str, Any] = {setting: "int8"}
    config = replace(config, **asked)
    with pytest.raises(UnsupportedModel, match=f"{setting} int8: the eager path serves.*cap"):
        create_torch_executor(config)
    with pytest.raises(UnsupportedModel, match=f"{setting} int8: the eager path"):
        TorchExecutor(config)


@pytest.mark.skipif(not load().is_native, reason="no compiled kernels here")
def test_pages_in_8_bits_that_their_heads_do_not_fit_are_the_setting_that_is_named(
    tmp_path: Path,
) -> None:
    folder = save_tiny_model("llama", tmp_path, head_dim=12)
    config = replace(demo("int8", "int8"), model_path=folder)
    with pytest.raises(UnsupportedModel, match=r"^kv_cache_dtype int8 needs heads of .*, not 12"):
        create_torch_executor(config)

    info = create_torch_executor(replace(config, kv_cache_dtype="auto")).info

    assert (info.quantization, info.kv_cache_dtype) == ("int8", "float32")
    assert "in int8, KV cache" in info.resources


def test_every_setting_that_its_modules_do_not_support_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model("gemma2", tmp_path)
    with pytest.raises(
        UnsupportedModel, match=r"^quantization int8, kv_cache_dtype int8: the eager"
    ):
        create_torch_executor(replace(demo("int8", "int8"), model_path=folder))
