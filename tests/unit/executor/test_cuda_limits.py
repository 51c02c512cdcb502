"""Limits of the CUDA path: into how many parts short contexts are split, how keys and values are
scaled to fp8, and which 8-bit formats a GPU supports.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cuda.eight_bit import check_eight_bit, measure_scales
from penstock.executor.torch.cuda.tiles import decode_tile
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.kv_pages import HeadShape, KVPages


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 32])
def test_short_contexts_are_split_into_at_most_1024_parts(kv_heads: int, is_fp8: bool) -> None:
    for rows in range(1, 600):
        tile = decode_tile(
            rows=rows,
            kv_heads=kv_heads,
            head_dim=128,
            dtype=torch.bfloat16,
            is_long=False,
            is_fp8=is_fp8,
        )
        assert tile.splits == 1 or tile.splits * rows * kv_heads <= 1024


def test_every_key_head_and_value_head_has_its_own_scale() -> None:
    pages = KVPages(
        (HeadShape(num_heads=2, head_dim=4),) * 2,
        num_blocks=3,
        block_size=2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    pages.layer(1)[2, 0, 1, 1, 3] = -700.0
    pages.layer(1)[0, 1, 0, 0, 0] = 0.007

    first, second = measure_scales(pages)

    assert first.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert second.dtype == torch.float32
    # A head without keys has scale 1; the greatest element becomes 56, an eighth of the maximum of
    # e4m3.
    expected = torch.tensor([[56.0, 700.0], [0.007, 56.0]]).bfloat16().flatten().tolist()
    assert (second * 56).flatten().tolist() == pytest.approx(expected)


H200, A100 = (9, 0), (8, 0)


def check(
    weights: str,
    pages: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = H200,
    width: int = 64,
) -> None:
    config = ExecutorConfig(
        model_path=Path("/models/words"),
        device="cuda",
        quantization=weights,
        kv_cache_dtype=pages,
    )
    linears = (nn.Linear(64, width, device="meta"),)
    check_eight_bit(config, dtype=dtype, capability=capability, linears=linears)


def test_supported_formats_are_accepted() -> None:
    check("fp8", "fp8")
    check("int8", "auto", dtype=torch.float16, capability=A100, width=50)
    check("int8", "fp8", dtype=torch.float32, width=50)


@pytest.mark.parametrize(("weights", "pages"), [("fp8", "auto"), ("none", "fp8")])
def test_fp8_is_rejected_on_an_older_gpu(weights: str, pages: str) -> None:
    name = "quantization" if weights == "fp8" else "kv_cache_dtype"
    with pytest.raises(UnsupportedModel, match=rf"{name} fp8 needs .* capability 8\.9"):
        check(weights, pages, capability=A100)


def test_int8_pages_are_rejected_on_a_gpu() -> None:
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype int8 is for a CPU"):
        check("none", "int8")


def test_fp8_products_need_their_number_format_and_widths() -> None:
    for name in ("float16", "float32"):
        with pytest.raises(UnsupportedModel, match=f"fp8 needs dtype bfloat16, not {name}$"):
            check("fp8", "auto", dtype=getattr(torch, name))
    with pytest.raises(UnsupportedModel, match="multiples of 16"):
        check("fp8", "auto", width=40)
