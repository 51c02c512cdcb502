"""The CPU kernels equal plain torch for any shape, number of threads and batch.

`make sanitize` runs these tests with a build that checks every memory access except accesses by
tiles.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import native
from penstock.executor.torch.cpu_kernels.kernels import PLAIN, load
from penstock.executor.torch.cpu_kernels.native_sampling import (
    SAMPLING_OPTIONS,
    can_sample,
    draw_rows,
)
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from support.kernel_steps import Case, Step

SETS = [*filter(native.is_supported, INSTRUCTION_SETS)]
DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(not SETS, reason="no compiled kernels here")

instruction_sets = st.sampled_from(SETS or [PLAIN])
dtypes = st.sampled_from(DTYPES)
thread_counts = st.integers(1, 9)
# Borders of a tile (64 keys), of a part (512), of an item's rows (32) and of its blocks (4 and 8).
lengths = st.integers(0, 70) | st.sampled_from((127, 128, 511, 512, 513, 1024))
counts = st.integers(0, 9) | st.sampled_from((15, 16, 17, 31, 32, 33, 63, 64, 65))

rows = st.lists(st.tuples(lengths, counts), min_size=1, max_size=5).filter(
    lambda rows: any(count for _, count in rows)
)
fewer = settings(max_examples=settings().max_examples // 4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    is_int8 = draw(st.booleans())
    heads, group = draw(st.sampled_from(((1, 1), (2, 1), (3, 2), (1, 7), (5, 4), (1, 33))))
    return Case(
        rows=tuple(draw(rows)),
        heads=heads,
        group=group,
        dim=draw(st.integers(1, 8)) * 16 if is_int8 else draw(st.integers(1, 70)) * 2,
        block_size=draw(st.sampled_from((1, 3, 8, 16, 32))),
        window=draw(st.sampled_from((0, 0, 1, 5, 64, 600))),
        softcap=draw(st.sampled_from((0.0, 2.0))),
        has_sinks=draw(st.booleans()),
        is_int8=is_int8,
    )


@contextmanager
def threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@fewer
@given(case=cases(), dtype=dtypes, instructions=instruction_sets, num_threads=thread_counts)
def test_any_rows_attend(
    case: Case, dtype: torch.dtype, instructions: str, num_threads: int
) -> None:
    step = Step(case, dtype)
    step.fill()
    query = step.query()
    expected = step.attend(PLAIN, query)

    with threads(num_threads):
        found = step.attend(instructions, query)

    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@fewer
@given(case=cases(), dtype=dtypes, instructions=instruction_sets, num_threads=thread_counts)
def test_any_keys_and_values_reach_their_pages_and_no_other(
    case: Case, dtype: torch.dtype, instructions: str, num_threads: int
) -> None:
    rotated = case.dim // 4 * 2
    angles = torch.rand(max(1, *(start + count for start, count in case.rows)), rotated // 2) * 6
    found = []
    for name in (instructions, PLAIN):
        step = Step(case, dtype)
        qkv = torch.randn(step.num_tokens, (step.num_heads + 2 * case.heads) * case.dim).to(dtype)
        norms = torch.rand(2, case.dim).to(dtype)
        with threads(num_threads):
            step.layer(name).rotate_and_write(
                step.rows,
                qkv,
                angles.cos(),
                angles.sin(),
                query_norm=norms[0],
                key_norm=norms[1],
                eps=1e-5,
            )
        found.append((qkv, _numbers(step.pages, case)))
    tolerance = max(TOLERANCE[dtype], 2e-2 * case.is_int8)
    for one, plain in zip(*found, strict=True):
        torch.testing.assert_close(one, plain, rtol=tolerance, atol=2 * tolerance, equal_nan=True)


@fewer
@given(
    num_rows=st.integers(0, 100),
    num_inputs=st.integers(1, 130),
    num_outputs=st.integers(1, 130),
    has_bias=st.booleans(),
    is_int8=st.booleans(),
    dtype=dtypes,
    instructions=instruction_sets,
    num_threads=thread_counts,
)
def test_any_product(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    has_bias: bool,
    is_int8: bool,
    dtype: torch.dtype,
    instructions: str,
    num_threads: int,
) -> None:
    if not is_int8:
        num_inputs, dtype = 2 * num_inputs, torch.bfloat16
    torch.manual_seed(num_inputs)
    bias = torch.randn(num_outputs) if has_bias else None
    weight = torch.randn(num_outputs, num_inputs)
    matrix = PackedMatrix(weight, bias, torch.int8 if is_int8 else torch.bfloat16)
    x = torch.randn(num_rows, num_inputs).to(dtype)
    found = []
    with threads(num_threads):
        for name in (instructions, PLAIN):
            kernels, out = load(name), torch.empty(num_rows, num_outputs, dtype=dtype)
            (kernels.int8_linear if is_int8 else kernels.bf16_linear)(x, matrix, out)
            found.append(out.float())
    # The kernels may round an input near the middle of two integers differently.
    tolerance = 0.1 * num_inputs**0.5 if is_int8 else 0.02 * num_inputs**0.5
    torch.testing.assert_close(*found, rtol=2e-2, atol=tolerance)


@fewer
@given(
    num_rows=st.integers(0, 20),
    size=st.integers(1, 300),
    dtype=dtypes,
    instructions=instruction_sets,
    num_threads=thread_counts,
)
def test_any_small_operator(
    num_rows: int, size: int, dtype: torch.dtype, instructions: str, num_threads: int
) -> None:
    torch.manual_seed(size)
    x, added = torch.randn(2, num_rows, size).to(dtype)
    weight, gate_up = torch.rand(size).to(dtype), torch.randn(num_rows, 2 * size).to(dtype)
    greatest = np.zeros((2, num_rows), dtype=np.int32), np.zeros((2, num_rows), dtype=np.bool_)
    found = []
    with threads(num_threads):
        for row, name in enumerate((instructions, PLAIN)):
            kernels, residual, outs = (
                load(name),
                x.clone(),
                torch.empty(2, num_rows, size).to(dtype),
            )
            kernels.add_rms_norm(residual, added, weight, 1e-5, outs[0])
            kernels.silu_mul(gate_up, outs[1])
            kernels.argmax_rows(x.float(), greatest[0][row], greatest[1][row])
            found.append((residual, outs))
    for one, plain in zip(*found, strict=True):
        torch.testing.assert_close(one, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert all((pair[0] == pair[1]).all() for pair in greatest)


@fewer
@given(
    logits=st.lists(st.floats(-20, 20, width=16), min_size=1, max_size=600),
    temperature=st.floats(0.1, 4),
    top_k=st.integers(0, 700),
    top_p=st.floats(0.01, 1),
    uniform=st.floats(0, 1, exclude_max=True),
    dtype=dtypes,
)
def test_any_draw_is_a_token_that_the_options_keep(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    uniform: float,
    dtype: torch.dtype,
) -> None:
    row = torch.tensor([logits]).to(dtype)
    if not can_sample(row):
        pytest.skip("the kernels are not compiled")
    options = np.array([(temperature, top_p, 0.0, top_k, uniform)], dtype=SAMPLING_OPTIONS)

    chosen = draw_rows(row, np.zeros(1, dtype=np.int64), options)

    assert chosen.is_good.all()
    values = row[0].float()
    likelier = int((values > values[int(chosen.tokens[0])]).sum())
    assert likelier < (top_k or len(logits))


def _numbers(pages: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the values of pages in float32; pages in 8 bits are multiplied by their scales."""
    if not case.is_int8:
        return pages.float()
    return pages[..., : case.dim] * pages[..., case.dim :].contiguous().view(torch.float32)
