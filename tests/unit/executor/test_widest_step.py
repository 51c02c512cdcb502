"""The steps whose peak memory is measured reach the limits of the settings and exceed none."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.executor.torch.widest_step import StepLimits, widest_step
from penstock.scheduler.batch import Batch


def step(
    max_tokens: int, max_rows: int, max_seq_len: int, num_keys: int, num_mask_elements: int
) -> Batch:
    limits = StepLimits(
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_seq_len=max_seq_len,
        num_keys=num_keys,
        num_mask_elements=num_mask_elements,
    )
    return widest_step(limits, vocab_size=300, block_size=16)


@pytest.mark.parametrize(
    ("limits", "rows", "decodes"),
    [
        ((64, 8, 100, 350, 10_000), (7, 1), (50, 57)),
        ((64, 8, 100, 9_000, 10_000), (7, 1), (100, 57)),
        # Chunks with a full mask each.
        ((64, 8, 100, 9_000, 3_200), (6, 2), (100, 29)),
        # More chunks than that, because they are shorter than their sequences.
        ((64, 8, 20, 9_000, 10_000), (4, 4), (20, 15)),
        ((64, 3, 2, 9_000, 10_000), (0, 3), (0, 1)),
        ((64, 1, 100, 350, 1), (0, 1), (0, 64)),
        ((1, 1, 100, 1, 1 << 20), (0, 1), (0, 1)),
        ((4, 8, 100, 0, 1 << 20), (7, 1), (1, 1)),
    ],
)
def test_decodes_and_chunks_reach_the_limits(
    limits: tuple[int, int, int, int, int], rows: tuple[int, int], decodes: tuple[int, int]
) -> None:
    (num_decodes, num_chunks), (context, chunk) = rows, decodes
    longest = limits[2]

    batch = step(*limits)

    assert batch.num_tokens.tolist() == [1] * num_decodes + [chunk] * num_chunks
    ends = (batch.starts + batch.num_tokens).tolist()
    assert ends == [context] * num_decodes + [longest] * num_chunks
    assert (batch.starts[num_decodes:] > 0).all()
    assert batch.sampled_slots.tolist() == batch.slots.tolist() == list(range(sum(rows)))
    assert batch.arrays.num_tokens.tolist() == ends
    assert not batch.arrays.block_table.any()


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 8])
def test_the_last_row_has_every_option_and_the_first_ones_have_fewer(max_rows: int) -> None:
    arrays = step(64, max_rows, 100, 9_000, 10_000).arrays

    has_option = np.stack(
        [
            arrays.repetition_penalty != 1.0,
            arrays.presence_penalty != 0.0,
            arrays.frequency_penalty != 0.0,
            arrays.num_logprobs > 0,
            arrays.temperature > 0.0,
            arrays.top_p < 1.0,
            arrays.top_k > 0,
        ]
    )

    assert has_option[:, -1].all()
    assert has_option.sum(0)[:4].tolist() == [0, 4, 5, 7][: max_rows - 1] + [7] * (max_rows <= 4)
