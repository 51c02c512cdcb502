"""Keys, values and weights in 8 bits: every instruction set of this machine against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.executor.torch.cpu_kernels import native
from penstock.executor.torch.cpu_kernels.kernels import PLAIN, LayerAttention, load
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.step_rows import StepRows

SETS = [*filter(native.is_supported, native.INSTRUCTION_SETS), PLAIN]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
each_set = pytest.mark.parametrize("instructions", SETS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
ROWS = ((0, 1), (15, 1), (130, 1), (9, 0), (600, 2), (0, 33), (40, 21))
BLOCK_SIZE, NUM_KV_HEADS = 16, 2


class Step:
    """Rows over shuffled pages; memory that nobody wrote holds scales that are not numbers."""

    def __init__(self, dim: int, dtype: torch.dtype, group: int) -> None:
        torch.manual_seed(3)
        starts, counts = np.array(ROWS, dtype=np.int32).T
        self.ends = starts + counts
        width = int(self.ends.max()) // BLOCK_SIZE + 1
        shuffled = np.random.default_rng(0).permutation(width * len(ROWS)).astype(np.int32)
        self.table = shuffled.reshape(len(ROWS), width)
        self.slots = np.arange(len(ROWS), dtype=np.int32)
        shape = (len(shuffled), 2, NUM_KV_HEADS, BLOCK_SIZE, dim + 4)
        self.pages = torch.full(shape, -1, dtype=torch.int8)
        self.num_heads, self.dtype = NUM_KV_HEADS * group, dtype
        self.rows = self._rows(counts, starts)
        self.history = self._rows(self.ends, np.zeros_like(starts))

    def layer(self, instructions: str) -> LayerAttention:
        return load(instructions).layer(
            self.pages, num_heads=self.num_heads, scaling=0.2, dtype=self.dtype
        )

    def fill(self, dim: int) -> None:
        """Write all that the rows see."""
        key, value = torch.randn(2, self.history.num_tokens, NUM_KV_HEADS, dim).to(self.dtype)
        self.layer(PLAIN).write(self.history, key * 3, value)

    def _rows(self, counts: np.ndarray, starts: np.ndarray) -> StepRows:
        rows = StepRows()
        rows.set(
            first_tokens=np.cumsum(counts, dtype=np.int32) - counts,
            num_tokens=np.ascontiguousarray(counts),
            starts=np.ascontiguousarray(starts),
            slots=self.slots,
            block_table=self.table,
        )
        return rows


@each_set
@each_dtype
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (48, 2), (128, 4), (16, 7)])
def test_rows_attend_over_pages_in_8_bits(
    dim: int, group: int, dtype: torch.dtype, instructions: str
) -> None:
    step = Step(dim, dtype, group)
    step.fill(dim)
    query = torch.randn(step.rows.num_tokens, step.num_heads, dim).to(dtype)
    outs = [torch.empty_like(query) for _ in range(2)]
    for name, out in zip((instructions, PLAIN), outs, strict=True):
        step.layer(name).attend(step.rows, query, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@each_set
@each_dtype
def test_keys_and_values_are_written_in_8_bits(dtype: torch.dtype, instructions: str) -> None:
    dim, pages = 48, []
    for name in (instructions, PLAIN):
        step = Step(dim, dtype, group=2)
        qkv = torch.randn(step.rows.num_tokens, step.num_heads + 2 * NUM_KV_HEADS, dim).to(dtype)
        qkv[5] = 0.0
        angles = torch.rand(700, dim // 2) * 6
        step.layer(name).rotate_and_write(step.rows, qkv.flatten(1), angles.cos(), angles.sin())
        pages.append(step.pages)
    one, plain = ((rows[..., :dim].int(), _scales(rows)) for rows in pages)
    # Where a number lies between two whole ones, its last bit chooses.
    assert int((one[0] - plain[0]).abs().max()) <= 1
    torch.testing.assert_close(one[1], plain[1], rtol=1e-2, atol=0, equal_nan=True)
    num_tokens = sum(count for _, count in ROWS)
    assert int(torch.isfinite(one[1]).sum()) == 2 * NUM_KV_HEADS * num_tokens


@each_set
@each_dtype
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 64), (77, 70), (512, 192)])
def test_a_product_with_weights_in_8_bits(
    num_inputs: int, num_outputs: int, dtype: torch.dtype, instructions: str
) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    matrix = PackedMatrix(weight, bias, torch.int8)
    wide = torch.randn(200, num_inputs + 3).to(dtype)
    x = wide[:, 1:-2]
    out = torch.full((200, num_outputs + 2), 7.0, dtype=dtype)
    load(instructions).int8_linear(x, matrix, out[:, 1:-1])

    expected = torch.empty(200, num_outputs, dtype=dtype)
    load(PLAIN).int8_linear(x, matrix, expected)
    # Sums of whole numbers are exact; where an input lies between two, its last bit chooses.
    difference = (out[:, 1:-1].float() - expected.float()).norm() / expected.float().norm()
    assert float(difference) < 3e-3
    assert (out[:, 0] == 7.0).all()
    assert (out[:, -1] == 7.0).all()
    exact = x.float() @ weight.T + bias
    assert float((expected - exact).norm() / exact.norm()) < 0.02
    alone = torch.empty(1, num_outputs, dtype=dtype)
    for row in (0, 3, 101, 199):
        load(instructions).int8_linear(x[row : row + 1], matrix, alone)
        assert torch.equal(alone[0], out[row, 1:-1])


@each_set
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 64), (78, 70), (512, 192)])
def test_a_product_in_bfloat16(num_inputs: int, num_outputs: int, instructions: str) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(num_outputs, num_inputs).bfloat16(), torch.randn(num_outputs)
    matrix = PackedMatrix(weight, bias.bfloat16(), torch.bfloat16)
    assert torch.equal(matrix.unpacked(), weight)
    x = torch.randn(200, num_inputs + 3).bfloat16()[:, 1:-2]
    out = torch.full((200, num_outputs + 2), 7.0).bfloat16()
    load(instructions).bf16_linear(x, matrix, out[:, 1:-1])

    expected = x.double() @ weight.T.double() + bias.bfloat16()
    torch.testing.assert_close(out[:, 1:-1].double(), expected, rtol=1e-2, atol=1e-2)
    assert (out[:, 0] == 7.0).all()
    assert (out[:, -1] == 7.0).all()
    if instructions != PLAIN:
        alone = torch.empty(1, num_outputs).bfloat16()
        for row in (0, 3, 101, 199):
            load(instructions).bf16_linear(x[row : row + 1], matrix, alone)
            assert torch.equal(alone[0], out[row, 1:-1])


@each_set
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(instructions: str, bad: float) -> None:
    matrix, x = PackedMatrix(torch.randn(64, 40), None, torch.int8), torch.randn(9, 40)
    x[4, 39], x[6] = bad, 0.0
    out = torch.empty(9, 64)
    load(instructions).int8_linear(x, matrix, out)
    assert torch.isfinite(out).all(1).tolist() == [row != 4 for row in range(9)]
    assert not out[6].any()


def test_heads_that_8_bits_do_not_fit_are_refused() -> None:
    if SETS == [PLAIN]:
        pytest.skip("no compiled kernels here")
    pages = torch.zeros(2, 2, 1, 16, 40 + 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="no multiple of 16"):
        load().layer(pages, num_heads=1, scaling=1.0, dtype=torch.bfloat16)


def _scales(pages: Tensor) -> Tensor:
    return pages[..., -4:].contiguous().view(torch.float32)
