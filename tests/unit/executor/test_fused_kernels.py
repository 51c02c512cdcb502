"""The fused step's kernels against plain float32, on CUDA or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from penstock.executor.torch.cuda.kernels import glue
from penstock.executor.torch.cuda.page_attention import Chunks
from penstock.executor.torch.cuda.small_projection import SmallProjection, project_row
from penstock.executor.torch.cuda.tiles import MAX_LONG_ROWS
from penstock.executor.torch.fused_weights import Projection
from support.fused_reference import AttentionBench, Case, relative_error
from support.triton_device import DEVICE, IS_INTERPRETED

KERNELS: Any = glue  # launched by subscript, which no type shows
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BF16 = torch.bfloat16
SMALL = [
    Case(),
    Case(head_dim=8, block_size=4),
    Case(heads=6, kv_heads=2, head_dim=24),
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
]
CASES = SMALL if IS_INTERPRETED else SMALL + LARGE
LENGTHS = [0, 37, 15, 16] if IS_INTERPRETED else [0, 37, 15, 16, 640, 8000, 2049, 255, 1000]


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

        expected = torch.cat(
            [
                bench.expected(slot, qkv[row : row + 1], LENGTHS[slot])
                for row, slot in enumerate(slots)
            ]
        )
        assert relative_error(out, expected) < TOLERANCE[case.dtype]


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
        for token in range(0, count, bench.attention.tokens_a_tile)
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

    bench.attention.chunks(0, bench.layer, qkv, out, staged, chunks)

    for slot, count in enumerate(counts):
        rows = slice(firsts[slot], firsts[slot] + count)
        expected = bench.expected(slot, qkv[rows], LENGTHS[slot])
        assert relative_error(out[rows], expected) < TOLERANCE[case.dtype]
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
    projection = SmallProjection(dtype=dtype, device=DEVICE)
    projection._parts.fill_(float("nan"))

    projection.project(x, Projection(weight=weight, bias=None))
    found = projection.project(x, Projection(weight=weight, bias=None))

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

    project_row(x, weight, out, **all_options[kind])

    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("hidden", [32, 96, 1000])
def test_a_norm_adds_first(hidden: int) -> None:
    generator = torch.Generator().manual_seed(4)
    added, residual = (torch.randn(3, hidden, generator=generator).to(DEVICE) for _ in range(2))
    weight = torch.randn(hidden, generator=generator).to(DEVICE)
    whole = added + residual
    expected = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    out = torch.full_like(residual, float("nan"))

    KERNELS.add_norm[(3,)](
        added, residual, weight, out, 1e-5, has_added=True, hidden=hidden, width=1024
    )

    assert relative_error(out, expected) < 1e-5
    assert torch.allclose(residual, whole)


def test_an_activation_gates() -> None:
    gate_up = torch.randn(3, 2 * 70, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    out = torch.full((3, 70), float("nan"), device=DEVICE)

    KERNELS.silu_mul[(3, 2)](gate_up, out, width=70, part=64)

    expected = torch.nn.functional.silu(gate_up[:, :70]) * gate_up[:, 70:]
    assert relative_error(out, expected) < 1e-5
