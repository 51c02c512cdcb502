"""How the kernels split their work: split parts fit into the scratch memory."""

from __future__ import annotations

import pytest
import torch

from penstock.executor.torch.cuda.tiles import decode_tile


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 32])
def test_parts_of_short_contexts_are_a_thousand_at_most(kv_heads: int, is_fp8: bool) -> None:
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
