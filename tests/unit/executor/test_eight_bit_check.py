"""8-bit settings for which a GPU or a model has no kernels are rejected by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cuda.eight_bit_check import check_eight_bit
from penstock.executor.torch.errors import UnsupportedModel

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


def test_what_there_are_kernels_for_is_taken() -> None:
    check("fp8", "fp8")
    check("int8", "auto", dtype=torch.float16, capability=A100, width=50)
    check("int8", "fp8", dtype=torch.float32, width=50)


@pytest.mark.parametrize(("weights", "pages"), [("fp8", "auto"), ("none", "fp8")])
def test_an_older_gpu_has_no_fp8(weights: str, pages: str) -> None:
    name = "quantization" if weights == "fp8" else "kv_cache_dtype"
    with pytest.raises(UnsupportedModel, match=rf"{name} fp8 needs .* capability 8\.9"):
        check(weights, pages, capability=A100)


def test_pages_in_int8_are_for_a_cpu() -> None:
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype int8 is for a CPU"):
        check("none", "int8")


def test_fp8_products_need_their_number_format_and_widths() -> None:
    with pytest.raises(UnsupportedModel, match="quantization fp8 needs dtype bfloat16"):
        check("fp8", "auto", dtype=torch.float16)
    with pytest.raises(UnsupportedModel, match="multiples of 16"):
        check("fp8", "auto", width=40)
