"""The fused step's kernels compared with a float32 reference, on CUDA or in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from penstock.executor.torch.cuda.kernels import glue
from penstock.executor.torch.cuda.page_attention import Chunks
from penstock.executor.torch.cuda.row_math import Product, RowMath
from penstock.executor.torch.cuda.scratch import Scratch
from penstock.executor.torch.cuda.step_projection import StepProjection, project_row
from penstock.executor.torch.cuda.tiles import BUCKETS, MAX_LONG_ROWS
from penstock.executor.torch.cuda.wide_weights import WeightWidener, with_wide_memory
from penstock.executor.torch.decoder_layer import DecoderLayer
from penstock.executor.torch.fused_weights import Projection
from penstock.executor.torch.quantised_weights import FP8, quantise
from unit.executor.fused_reference import AttentionBench, Case, relative_error
from unit.executor.triton_device import DEVICE, IS_INTERPRETED

KERNELS: Any = glue  # launched by subscript, which no type shows
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BF16 = torch.bfloat16
ROUNDS_TO_FP8 = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter rounds wrongly to fp8")
NOTHING = Projection(weight=torch.zeros(1), bias=None)
SMALL = [
    Case(),
    Case(head_dim=8, block_size=4),
    Case(heads=6, kv_heads=2, head_dim=24, is_scaled=True),
    Case(window=20),
    Case(is_normed=True, kv_heads=4),
]
LARGE = [
    Case(heads=32, kv_heads=8, head_dim=64, dtype=BF16),
    Case(heads=32, kv_heads=8, head_dim=128, dtype=BF16),
    Case(heads=14, kv_heads=2, head_dim=64, dtype=BF16),
    Case(heads=28, kv_heads=4, head_dim=128, is_normed=True, dtype=BF16),
    Case(heads=32, kv_heads=8, head_dim=96, window=700, dtype=BF16),
    Case(heads=16, kv_heads=16, head_dim=256, dtype=BF16),
    Case(heads=32, kv_heads=8, head_dim=128, block_size=32, dtype=torch.float16),
    Case(heads=8, kv_heads=2, head_dim=128, window=100),
    Case(heads=32, kv_heads=8, head_dim=64, dtype=BF16, page_dtype=FP8, is_scaled=True),
    Case(heads=32, kv_heads=8, head_dim=128, dtype=BF16, page_dtype=FP8),
]
CASES = SMALL if IS_INTERPRETED else SMALL + LARGE
LENGTHS = [0, 37, 15, 16] if IS_INTERPRETED else [0, 37, 15, 16, 640, 8000, 2049, 255, 1000]


def tolerance(case: Case) -> float:
    """Return the tolerated relative error. It is larger for fp8 pages: a kernel and the reference
    may round a rotated key to different fp8 values.
    """
    if case.page_dtype is None:
        return TOLERANCE[case.dtype]
    return 2e-2


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_decode_attends_to_its_own_keys(case: Case, is_long: bool) -> None:
    bench = AttentionBench(case, LENGTHS, [length + 1 for length in LENGTHS], DEVICE)
    for num_rows in (MAX_LONG_ROWS if is_long else len(LENGTHS), 2, 1):
        slots = list(range(len(LENGTHS)))[-num_rows:][::-1]
        num_rows = len(slots)
        staged = torch.stack((ints(*slots), ints(*(LENGTHS[slot] for slot in slots))))
        qkv = bench.qkv(num_rows)
        out = torch.full((num_rows, case.heads * case.head_dim), float("nan"), device=DEVICE)
        out = out.to(case.dtype)
        tile = bench.attention.tile_for(num_rows, is_long=is_long)

        for _ in range(2):  # the counters are as they were
            bench.attention.decode(0, bench.layer, qkv, out, staged, rows=num_rows, tile=tile)

        expected = bench.expected_decodes(slots, qkv, LENGTHS)
        assert relative_error(out, expected) < tolerance(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes_with_the_tile_of_every_batch_size(case: Case) -> None:
    bench = AttentionBench(case, LENGTHS, [length + 1 for length in LENGTHS], DEVICE)
    slots = range(len(LENGTHS))
    staged = torch.stack((ints(*slots), ints(*LENGTHS)))
    qkv = bench.qkv(len(LENGTHS))
    expected = bench.expected_decodes(slots, qkv, LENGTHS)
    for tile in {bench.attention.tile_for(rows, is_long=False) for rows in BUCKETS}:
        out = torch.full((len(LENGTHS), case.heads * case.head_dim), float("nan"), device=DEVICE)
        out = out.to(case.dtype)

        bench.attention.decode(0, bench.layer, qkv, out, staged, rows=len(LENGTHS), tile=tile)

        assert relative_error(out, expected) < tolerance(case), tile


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_attend_to_the_past_and_to_themselves(case: Case) -> None:
    counts = [3, 21, 1, 40] if IS_INTERPRETED else [3, 210, 1, 40, 512, 77, 130, 600, 64]
    totals = [length + count for length, count in zip(LENGTHS, counts, strict=True)]
    bench = AttentionBench(case, LENGTHS, totals, DEVICE)
    first_token = 2
    num_tokens = sum(counts)
    firsts = [first_token]
    for count in counts:
        firsts.append(firsts[-1] + count)
    tiles = [
        (chunk, token)
        for chunk, count in enumerate(counts)
        for token in range(0, count, bench.attention.tokens_per_tile)
    ]
    positions = [0] * first_token + [
        length + token
        for length, count in zip(LENGTHS, counts, strict=True)
        for token in range(count)
    ]
    table = bench.table.cpu()
    blocks = [0] * first_token + [
        int(table[slot, (LENGTHS[slot] + token) // case.block_size])
        for slot, count in enumerate(counts)
        for token in range(count)
    ]
    zeros = ints(*([0] * (first_token + num_tokens)))
    staged = torch.stack((zeros, ints(*positions), zeros, ints(*blocks)))
    chunks = Chunks(
        first_token=first_token,
        num_tokens=num_tokens,
        num_tiles=len(tiles),
        tile_chunks=ints(*(chunk for chunk, _ in tiles)),
        tile_tokens=ints(*(token for _, token in tiles)),
        firsts=ints(*firsts),
        starts=ints(*LENGTHS),
        slots=ints(*range(len(LENGTHS))),
    )
    qkv = bench.qkv(first_token + num_tokens)
    out = torch.full(
        (first_token + num_tokens, case.heads * case.head_dim), float("nan"), device=DEVICE
    ).to(case.dtype)

    bench.attention.chunks(0, bench.layer, qkv, out, staged, chunks, Scratch(DEVICE))

    for slot, count in enumerate(counts):
        rows = slice(firsts[slot], firsts[slot] + count)
        expected = bench.expected(slot, qkv[rows], LENGTHS[slot])
        assert relative_error(out[rows], expected) < tolerance(case)
    assert out[:first_token].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 32, 33])
@pytest.mark.parametrize("shape", [(64, 256), (256, 512), (6144, 4096), (2048, 8192), (100, 96)])
def test_a_projection_of_few_rows(shape: tuple[int, int], rows: int) -> None:
    if IS_INTERPRETED and shape[0] * shape[1] > 1 << 17:
        pytest.skip("too much for the interpreter")
    dtype = torch.float16 if IS_INTERPRETED else torch.bfloat16
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    x = torch.randn((rows, shape[1]), generator=generator).to(dtype).to(DEVICE)
    projection = StepProjection(dtype=dtype, device=DEVICE)
    projection._parts.fill_(float("nan"))
    found = torch.full((rows, shape[0]), float("nan"), device=DEVICE).to(dtype)

    for _ in range(2):  # the counters are as they were
        projection.project(x, Projection(weight=weight, bias=None), found)

    assert relative_error(found, x.float() @ weight.float().T) < 1e-2


@pytest.mark.parametrize("shape", [(64, 128), (50, 96), (2048, 8192)])
@pytest.mark.parametrize("kind", ["plain", "normed", "gated", "added"])
def test_a_projection_of_one_row(shape: tuple[int, int], kind: str) -> None:
    if IS_INTERPRETED and shape[0] > 64:
        pytest.skip("too much for the interpreter")
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(DEVICE)

    weight = random(num_out * (2 if kind == "gated" else 1), num_in) * num_in**-0.5
    x, norm, out = random(1, num_in), random(num_in), random(1, num_out)
    before = out.float().clone()
    all_options: dict[str, dict[str, Any]] = {
        "plain": {},
        "normed": {"norm": norm, "eps": 1e-5},
        "gated": {"is_gated": True, "norm": norm, "eps": 1e-5},
        "added": {"is_added": True},
    }
    value = x.float()
    if kind in ("normed", "gated"):
        value = value * torch.rsqrt(value.pow(2).mean() + 1e-5) * norm.float()
    expected = value @ weight.float().T
    if kind == "gated":
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    if kind == "added":
        expected = expected + before

    project_row(x, Projection(weight=weight, bias=None), out, **all_options[kind])

    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("hidden", [32, 96, 1000])
def test_a_norm_adds_first(hidden: int) -> None:
    generator = torch.Generator().manual_seed(4)
    added, residual = (torch.randn(3, hidden, generator=generator).to(DEVICE) for _ in range(2))
    weight = torch.randn(hidden, generator=generator).to(DEVICE)
    whole = added + residual
    expected = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    math = RowMath(hidden=hidden, eps=1e-5, dtype=torch.float32, device=DEVICE, is_fp8=False)
    out = math.norm(Scratch(DEVICE), Product(added, None, NOTHING), residual, weight).values

    assert relative_error(out, expected) < 1e-5
    assert torch.allclose(residual, whole)


@ROUNDS_TO_FP8
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_in_eight_bits_is_near_the_same_in_float(rows: int, has_bias: bool) -> None:
    hidden, width = 96, 160
    generator = torch.Generator().manual_seed(4)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(DEVICE)

    def projection(num_out: int, num_in: int) -> tuple[Projection, Projection]:
        weight = random(num_out, num_in) * num_in**-0.5
        bias = random(num_out) if has_bias else None
        values, scale = quantise(weight, "fp8")
        of_bf16 = None if bias is None else bias.bfloat16()
        return (
            Projection(weight=weight, bias=bias),
            Projection(weight=values, bias=of_bf16, scale=scale),
        )

    pairs = [projection(2 * width, hidden), projection(hidden, width), projection(hidden, hidden)]
    weight, residual = random(hidden), random(rows, hidden)

    def run(is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down, first = (pair[is_fp8] for pair in pairs)
        dtype = BF16 if is_fp8 else torch.float32
        math = RowMath(hidden=hidden, eps=1e-5, dtype=dtype, device=DEVICE, is_fp8=is_fp8)
        x, scratch = residual.to(dtype), Scratch(DEVICE)
        whole = math.apply_scales(
            math.project(scratch, math.projection_input(scratch, x), first, "first")
        )
        normed = math.norm(scratch, Product(whole, None, first), x, weight.to(dtype))
        activated = math.activate(scratch, math.project(scratch, normed, gate_up, "gate up"))
        added = math.project(scratch, activated, down, "added")
        last = added.take(torch.arange(rows, dtype=torch.int32, device=DEVICE))
        own = Scratch(DEVICE)
        return math.norm(own, last, x, weight.to(dtype), is_last=True).values, x

    for found, expected in zip(run(True), run(False), strict=True):
        assert relative_error(found, expected) < 6e-2


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 8, 33, 128, 129])
def test_weights_in_eight_bits_are_widened(rows: int, quantization: str) -> None:
    dtype = torch.float16 if IS_INTERPRETED else BF16
    generator = torch.Generator().manual_seed(3)
    shape = (64, 256) if IS_INTERPRETED else (2048, 8192)
    weight = torch.randn(shape, generator=generator).to(DEVICE) * shape[1] ** -0.5
    bias = torch.randn(shape[0], generator=generator).to(DEVICE).to(dtype)
    x = torch.randn((rows, shape[1]), generator=generator).to(DEVICE).to(dtype)
    values, scale = quantise(weight, quantization)
    exact = values.float() * scale[:, None]
    wide = torch.full(shape, float("nan"), device=DEVICE).to(dtype)
    small = StepProjection(dtype=dtype, device=DEVICE)
    out = torch.full((rows, shape[0]), float("nan"), device=DEVICE).to(dtype)

    found = small.project(x, Projection(weight=values, bias=bias, scale=scale, wide=wide), out)

    assert relative_error(found, x.float() @ exact.T + bias.float()) < 1e-2
    assert relative_error(exact, weight) < (3e-2 if quantization == "fp8" else 1e-2)


@pytest.mark.parametrize("shape", [(5, 7), (3, 2048), (2, 4000), (4, 2050)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_wide_weight_is_the_eight_bits_times_its_scales(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if IS_INTERPRETED and dtype == BF16:
        pytest.skip("the interpreter rounds wrongly to bfloat16")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    values, scale = quantise(weight, "int8")
    guarded = torch.full((shape[0] + 1, shape[1]), 9.0, device=DEVICE).to(dtype)
    widener = WeightWidener()

    for _ in range(2):  # through Triton's launcher and directly
        guarded[:-1] = float("nan")
        projection = Projection(weight=values, bias=None, scale=scale, wide=guarded[:-1])
        found = widener.widen(projection)

        assert torch.equal(found, (values.float() * scale[:, None]).to(dtype).t())
    assert (guarded[-1] == 9.0).all()


def test_all_layers_share_the_memory_of_the_widest_weight() -> None:
    def projection(num_out: int, num_in: int) -> Projection:
        values, scale = quantise(torch.randn(num_out, num_in, device=DEVICE), "int8")
        return Projection(weight=values, bias=None, scale=scale)

    norm = torch.ones(32, device=DEVICE)
    layers = tuple(
        DecoderLayer(
            qkv=projection(48, 32),
            out=projection(32, 32),
            gate_up=projection(200, 32),
            down=projection(32, 100),
            input_norm=norm,
            output_norm=norm,
            query_norm=None,
            key_norm=None,
            window=0,
        )
        for _ in range(2)
    )
    found = with_wide_memory(layers, torch.float16)

    projections = [one for layer in found for one in layer.products]
    shared = [one.wide for one in projections if one.wide is not None]
    assert len(shared) == 8
    assert {one.shape for one in shared} == {(48, 32), (32, 32), (200, 32), (32, 100)}
    assert {one.data_ptr() for one in shared} == {shared[0].data_ptr()}
    assert shared[0].untyped_storage().nbytes() == 200 * 32 * 2


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_one_row_of_weights_in_eight_bits(quantization: str, is_gated: bool) -> None:
    dtype = torch.float32 if IS_INTERPRETED else BF16
    num_out, num_in = (50, 96) if IS_INTERPRETED else (2048, 14336)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_out, num_in, generator=generator).to(DEVICE) * num_in**-0.5
    x = torch.randn(1, num_in, generator=generator).to(DEVICE).to(dtype)
    values, scale = quantise(weight, quantization)
    out = torch.full((1, num_out // 2 if is_gated else num_out), float("nan")).to(DEVICE).to(dtype)

    project_row(x, Projection(weight=values, bias=None, scale=scale), out, is_gated=is_gated)

    expected = x.float() @ (values.float() * scale[:, None]).T
    if is_gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    assert relative_error(out, expected) < 1e-2


@ROUNDS_TO_FP8
def test_a_row_that_is_not_finite_affects_no_other_row_in_eight_bits() -> None:
    x = torch.ones(3, 32, device=DEVICE)
    x[1, 5], x[2, 5] = float("nan"), float("inf")
    math = RowMath(hidden=32, eps=1e-5, dtype=BF16, device=DEVICE, is_fp8=True)
    values, scale = quantise(torch.eye(32, device=DEVICE), "fp8")
    projection = Projection(weight=values, bias=None, scale=scale)
    scratch = Scratch(DEVICE)

    rows = math.projection_input(scratch, x.bfloat16())
    found = math.apply_scales(math.project(scratch, rows, projection, "whole"))

    assert found[0].isfinite().all()
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()


def test_the_silu_kernel_gates_like_torch() -> None:
    gate_up = torch.randn(3, 2 * 70, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    out = torch.full((3, 70), float("nan"), device=DEVICE)

    KERNELS.silu_mul[(3, 2)](gate_up, out, width=70, part=64)

    expected = torch.nn.functional.silu(gate_up[:, :70]) * gate_up[:, 70:]
    assert relative_error(out, expected) < 1e-5


def test_rows_with_a_value_that_is_not_finite_are_flagged() -> None:
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    rows[1, 10], rows[2, 39], rows[3, 20] = float("nan"), float("inf"), -float("inf")
    rows[4, 9] = float("nan")  # before the first
    flags = torch.full((6,), 9, dtype=torch.uint8, device=DEVICE)

    KERNELS.flag_finite[(6,)](rows, flags, stride=40, first=10, count=30, padded=32)

    assert flags.tolist() == [1, 0, 0, 0, 1, 1]
