"""The number formats of an executor in the ready line."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.executor.torch.loading import load_model
from penstock.executor.torch.resources import describe_resources
from support.torch_models import save_tiny_model


def test_eight_bits_are_told_beside_what_they_take(tmp_path: Path) -> None:
    model = load_model(save_tiny_model("llama", tmp_path), device="cpu", dtype="float32")

    plain = describe_resources(model, page_bytes=1 << 20, path="fused", num_weight_bytes=3 << 20)
    eight_bit = describe_resources(
        model,
        page_bytes=1 << 20,
        path="fused",
        num_weight_bytes=3 << 20,
        quantization="int8",
        page_dtype=torch.float8_e4m3fn,
    )

    assert plain.endswith("float32, fused path, weights 3 MiB, pages 1 MiB")
    assert eight_bit.endswith("weights 3 MiB in int8, pages 1 MiB in float8_e4m3fn")
