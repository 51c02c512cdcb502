"""Scales of 8-bit pages follow the values of a sequence, head by head."""

from __future__ import annotations

import pytest
import torch

from penstock.executor.torch.cuda.page_scales import measure_scales
from penstock.executor.torch.kv_pages import HeadShape, KVPages


def test_every_head_of_keys_and_of_values_has_its_own() -> None:
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
    # A head that wrote nothing keeps 1; the greatest element lands at 56, an eighth of e4m3's.
    expected = torch.tensor([[56.0, 700.0], [0.007, 56.0]]).bfloat16().flatten().tolist()
    assert (second * 56).flatten().tolist() == pytest.approx(expected)
