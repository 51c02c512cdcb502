"""Paged attention and its helpers, without a model: how accurate they are, how rows are grouped,
and which weights are packed.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import native
from penstock.executor.torch.cpu_kernels.kernels import PLAIN, load
from penstock.executor.torch.executor import keep_freed_memory
from penstock.executor.torch.kv_pages import HeadShape, KVPages
from penstock.executor.torch.paged_attention import PagedAttention, Scoring, TileLimits
from penstock.executor.torch.prepacked_linear import can_prepack, prepack_linears
from penstock.executor.torch.step_inputs import StepInputs, split_by_length
from penstock.scheduler.slot_arrays import SlotArrays
from support.batches import batch_of, fill_slot
from support.core import make_spec

BLOCK_SIZE = 16
HEADS, GROUP, DIM = 2, 3, 64


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=80),
    overhead=st.floats(0.0, 1000.0),
)
def test_groups_cover_all_rows_and_no_cheaper_uniform_cut_exists(
    lengths: list[int], overhead: float
) -> None:
    rows = np.sort(np.array(lengths, dtype=np.int64))

    groups = split_by_length(rows, overhead)

    assert groups[0][0] == 0
    assert groups[-1][1] == len(rows)
    assert all(one[1] == next_one[0] for one, next_one in pairwise(groups))
    assert all(width == rows[last - 1] for _, last, width in groups)
    cost = sum(overhead + (last - first) * width for first, last, width in groups)
    assert cost <= overhead + len(rows) * rows[-1] + 1e-6


class Paged:
    """Requests with random keys and values, and paged attention over shuffled pages of
    one layer.
    """

    def __init__(
        self, lengths: Sequence[int], dtype: torch.dtype, offset: float, kernels: str = PLAIN
    ) -> None:
        self.dtype = dtype
        self.lengths = list(lengths)
        torch.manual_seed(3)
        self.pages = KVPages(
            (HeadShape(num_heads=HEADS, head_dim=DIM),),
            num_blocks=200,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.attention = PagedAttention(self.pages, kernels=load(kernels))
        self.arrays = SlotArrays(num_slots=len(lengths), max_seq_len=512, block_size=BLOCK_SIZE)
        shuffled = np.random.default_rng(0).permutation(200)
        self.keys, self.values = [], []
        for slot, length in enumerate(lengths):
            fill_slot(self.arrays, make_spec(slot + 1, [5] * length, hashed=False), slot)
            num_blocks = -(-length // BLOCK_SIZE)
            self.arrays.block_table[slot, :num_blocks] = shuffled[:num_blocks]
            shuffled = shuffled[num_blocks:]
            drift = offset * torch.randn(1, HEADS, DIM) / 4
            self.keys.append((torch.randn(length, HEADS, DIM) + drift).to(dtype))
            self.values.append(torch.randn(length, HEADS, DIM).to(dtype))

    def run(
        self, rows: Sequence[tuple[int, int, int]], query: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Compute the attention of one step. Each row is (slot, position of its first token, number
        of tokens). Return the outputs in packed order, and the (slot, position) of each token.
        """
        step = StepInputs(
            batch_of(self.arrays, rows), self.pages, num_embeddings=300, overhead_blocks=4.0
        )
        slot_of = np.empty(step.num_tokens, dtype=int)
        for row, (slot, _, count) in enumerate(rows):
            last = int(step.last_of_row[row])
            slot_of[last + 1 - count : last + 1] = slot
        places = list(zip(slot_of.tolist(), step.position_ids[0].tolist(), strict=True))
        key = torch.stack([self.keys[slot][position] for slot, position in places])
        value = torch.stack([self.values[slot][position] for slot, position in places])
        out = self.attention.attend(0, step, query[: len(places)], key, value, scoring)
        return out, places

    def exact(
        self, slot: int, position: int, query: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Return the attention output [Hq, D] of one token, computed in float64."""
        first = max(0, position + 1 - scoring.window) if scoring.window else 0
        keys = self.keys[slot][first : position + 1].double().repeat_interleave(GROUP, 1)
        values = self.values[slot][first : position + 1].double().repeat_interleave(GROUP, 1)
        scores = torch.einsum("hd,shd->hs", query.double(), keys) * scoring.scaling
        if scoring.softcap:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(keys)]
        return torch.einsum("hs,shd->hd", weights, values)


SCORINGS = {
    "plain": Scoring(scaling=0.125),
    "window": Scoring(scaling=0.125, window=20),
    "window of a block": Scoring(scaling=0.125, window=16),
    "softcap": Scoring(scaling=0.125, softcap=3.0),
    "softcap and window": Scoring(scaling=0.1, softcap=3.0, window=33),
    "sinks": Scoring(scaling=0.125, sinks=torch.tensor([1.0, -2.0, 3.0, 0.5, 5.0, 0.0])),
    "sinks and window": Scoring(scaling=0.125, window=7, sinks=torch.linspace(-1, 4, 6)),
}


# PLAIN: tensor operations. Instruction sets by themselves: test_cpu_kernels.py.
each_way = pytest.mark.parametrize(
    "kernels", [PLAIN, *filter(native.is_supported, INSTRUCTION_SETS)][:2]
)


@each_way
@pytest.mark.parametrize("name", SCORINGS)
def test_mixed_steps_attend_as_float64_does(name: str, kernels: str) -> None:
    lengths = (1, 15, 16, 17, 33, 90, 64, 200)
    paged = Paged(lengths, torch.float32, offset=1.0, kernels=kernels)
    scoring = SCORINGS[name]
    query = torch.randn(600, HEADS * GROUP, DIM)
    # First chunks of the longer ones, whole prompts of the shorter; then the rest next to decodes.
    steps = [
        [(slot, 0, min(length, 40)) for slot, length in enumerate(lengths)],
        [(slot, 40, length - 41) for slot, length in enumerate(lengths) if length > 41],
        [(7, 199, 1), (5, 89, 1), (6, 63, 1)],
    ]
    for rows in steps:
        out, places = paged.run(rows, query, scoring)
        for packed, (slot, position) in enumerate(places):
            expected = paged.exact(slot, position, query[packed], scoring)
            torch.testing.assert_close(out[packed].double(), expected, rtol=1e-4, atol=1e-4)


@each_way
@pytest.mark.parametrize("name", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("offset", [0.0, 20.0], ids=["small scores", "large scores"])
def test_bfloat16_decode_is_as_good_as_its_inputs(offset: float, name: str, kernels: str) -> None:
    # Rounding the scores themselves to 8 bits would miss by 0.009 and 0.016.
    lengths = (500, 400, 300, 30)
    paged = Paged(lengths, torch.bfloat16, offset, kernels)
    query = (torch.randn(4, HEADS * GROUP, DIM) * 4).bfloat16()
    scoring = SCORINGS[name]
    chunks = [(slot, 0, length - 1) for slot, length in enumerate(lengths)]
    paged.run(chunks, torch.randn(sum(lengths), HEADS * GROUP, DIM).bfloat16(), scoring)

    out, places = paged.run([(slot, n - 1, 1) for slot, n in enumerate(lengths)], query, scoring)

    expected = torch.stack(
        [
            paged.exact(slot, position, query[i], scoring)
            for i, (slot, position) in enumerate(places)
        ]
    )
    error = (out.double() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.006


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCORINGS)
def test_earlier_content_of_a_block_does_not_matter(name: str, dtype: torch.dtype) -> None:
    lengths = (1, 2, 5, 15, 16, 17, 30, 90)
    scoring = SCORINGS[name]
    query = (torch.randn(400, HEADS * GROUP, DIM) * 2).to(dtype)
    chunks = [(slot, 0, length) for slot, length in enumerate(lengths)]
    decodes = [(slot, length - 1, 1) for slot, length in enumerate(lengths)]
    seen: list[torch.Tensor] = []
    for left_behind in (0.0, 1.0, 100.0):
        paged = Paged(lengths, dtype, offset=0.0)
        paged.pages.block_rows(0).normal_().mul_(left_behind)
        prefilled, _ = paged.run(chunks, query, scoring)
        decoded, _ = paged.run(decodes, query, scoring)
        seen.append(torch.cat([prefilled, decoded]))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("name", ["softcap", "sinks", "sinks and window"])
def test_a_product_beyond_float16_is_no_failure(name: str) -> None:
    # Products are 80,000 and more before scaling, and 10,000 after it.
    lengths = (90, 40)
    paged = Paged(lengths, torch.float16, offset=0.0)
    paged.keys = [key * 30 for key in paged.keys]
    query = (torch.randn(130, HEADS * GROUP, DIM) * 100).half()

    chunks, _ = paged.run(
        [(slot, 0, n - 1) for slot, n in enumerate(lengths)], query, SCORINGS[name]
    )
    decodes, _ = paged.run(
        [(slot, n - 1, 1) for slot, n in enumerate(lengths)], query, SCORINGS[name]
    )

    assert torch.isfinite(chunks).all()
    assert torch.isfinite(decodes).all()


def test_prepacked_layers_give_the_same_numbers_and_free_the_memory() -> None:
    if not (can_prepack() or load().is_native):
        pytest.skip("no such layers without compiled kernels here")
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(50, 32)
    tied = torch.nn.Linear(32, 50, bias=False)
    tied.weight = embedding.weight
    free = torch.nn.Linear(32, 48)
    model = torch.nn.ModuleList([embedding, tied, free]).to(torch.bfloat16).requires_grad_(False)
    odd = torch.nn.Linear(31, 8, dtype=torch.bfloat16)
    model.append(odd)
    x = torch.randn(2, 5, 32).bfloat16()
    expected = tied(x), free(x)

    assert prepack_linears(model) == 2

    for found, wanted in zip((tied(x), free(x)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert odd.weight.untyped_storage().nbytes() == 31 * 8 * 2
    assert free.weight.shape == (48, 32)
    assert free.weight.untyped_storage().nbytes() < 16
    # A module that still reads it computes no number with it.
    assert free.weight.isnan().all()
    assert embedding.weight.untyped_storage().nbytes() == 50 * 32 * 2


def test_a_layer_that_the_model_keeps_in_float32_is_not_packed() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 8)).bfloat16()
    model._keep_in_fp32_modules = ["1.weight"]

    prepack_linears(model)

    assert not model[1].weight.isnan().any()
    assert "forward" not in vars(model[1])


def test_float32_layers_are_not_packed() -> None:
    assert prepack_linears(torch.nn.Sequential(torch.nn.Linear(4, 4))) == 0


def test_freed_memory_is_kept_where_glibc_allocates() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


class LargestTemporary(TorchDispatchMode):
    """A context manager that records the size, in bytes, of the largest tensor that an operator
    allocates.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        returned = func(*args, **(kwargs or {}))
        given = {
            one.untyped_storage().data_ptr()
            for one in (*args, *(kwargs or {}).values())
            if isinstance(one, torch.Tensor)
        }
        for one in returned if isinstance(returned, tuple | list) else (returned,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, one.untyped_storage().nbytes())
        return returned


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("is_decode", [False, True], ids=["chunk", "decodes"])
def test_no_temporary_grows_with_heads_and_chunk_and_context(name: str, is_decode: bool) -> None:
    scoring, num_keys = SCORINGS[name], 500
    paged = Paged((num_keys,) * 6, torch.float32, offset=1.0)
    bound = 1 << 17
    paged.attention = PagedAttention(
        paged.pages,
        TileLimits(gathered_bytes=bound, num_scores=bound // 4, num_mask_elements=bound // 4),
        load(PLAIN),
    )
    earlier = [(slot, 0, num_keys - 1) for slot in range(6)]
    query = torch.randn(6 * num_keys, HEADS * GROUP, DIM)
    paged.run(earlier, query, scoring)
    rows = [(slot, num_keys - 1, 1) for slot in range(6)] if is_decode else [(0, 250, 250)]

    with LargestTemporary() as largest:
        out, places = paged.run(rows, query, scoring)

    for packed, (slot, position) in enumerate(places):
        expected = paged.exact(slot, position, query[packed], scoring)
        torch.testing.assert_close(out[packed].double(), expected, rtol=1e-4, atol=1e-4)
    # The output of 250 tokens, or one row of one head; all scores would be 3.0 MB, and all
    # gathered pages 3.1 MB.
    of_one = 2 * 512 * DIM * 4
    assert largest.num_bytes <= max(out.nbytes, of_one, bound)
