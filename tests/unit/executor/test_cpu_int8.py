"""The CPU kernels for 8-bit keys, values and weights, and for bfloat16 weights, compared with torch
for every instruction set of this machine.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import native
from penstock.executor.torch.cpu_kernels.kernels import PLAIN, load
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from support.kernel_steps import Case, Step

SETS = [*filter(native.is_supported, INSTRUCTION_SETS), PLAIN]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
each_set = pytest.mark.parametrize("instructions", SETS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
ROWS = ((0, 1), (15, 1), (130, 1), (9, 0), (600, 2), (0, 33), (40, 21))


@each_set
@each_dtype
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (48, 2), (128, 4), (16, 7)])
def test_rows_attend_over_pages_in_8_bits(
    dim: int, group: int, dtype: torch.dtype, instructions: str
) -> None:
    step = Step(Case(rows=ROWS, dim=dim, group=group, is_int8=True), dtype)
    step.fill()
    query = step.query()
    torch.testing.assert_close(
        step.attend(instructions, query),
        step.attend(PLAIN, query),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


@each_set
@each_dtype
def test_keys_and_values_are_written_in_8_bits(dtype: torch.dtype, instructions: str) -> None:
    case, pages = Case(rows=ROWS, dim=48, group=2, is_int8=True), []
    for name in (instructions, PLAIN):
        step = Step(case, dtype)
        qkv = torch.randn(step.num_tokens, step.num_heads + 2 * case.heads, case.dim).to(dtype)
        qkv[5] = 0.0
        angles = torch.rand(700, case.dim // 2) * 6
        step.layer(name).rotate_and_write(step.rows, qkv.flatten(1), angles.cos(), angles.sin())
        pages.append(step.pages)
    one, plain = ((rows[..., : case.dim].int(), _scales(rows)) for rows in pages)
    # Where a number lies between two whole ones, its last bit chooses.
    assert int((one[0] - plain[0]).abs().max()) <= 1
    torch.testing.assert_close(one[1], plain[1], rtol=1e-2, atol=0, equal_nan=True)
    num_tokens = sum(count for _, count in ROWS)
    assert int(torch.isfinite(one[1]).sum()) == 2 * case.heads * num_tokens


@each_set
@each_dtype
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(64, 64), (77, 70), (512, 192), (4160, 70)]
)
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
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(64, 64), (78, 70), (512, 192), (2080, 70)]
)
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
def test_a_row_that_is_not_finite_affects_no_other_row(instructions: str, bad: float) -> None:
    matrix, x = PackedMatrix(torch.randn(64, 40), None, torch.int8), torch.randn(9, 40)
    x[4, 39], x[6] = bad, 0.0
    out = torch.empty(9, 64)
    load(instructions).int8_linear(x, matrix, out)
    assert torch.isfinite(out).all(1).tolist() == [row != 4 for row in range(9)]
    assert not out[6].any()


def test_heads_that_8_bits_do_not_fit_are_rejected() -> None:
    if SETS == [PLAIN]:
        pytest.skip("no compiled kernels here")
    pages = torch.zeros(2, 2, 1, 16, 40 + 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="no multiple of 16"):
        load().layer(pages, num_heads=1, scaling=1.0, dtype=torch.bfloat16)


def _scales(pages: Tensor) -> Tensor:
    return pages[..., -4:].contiguous().view(torch.float32)
