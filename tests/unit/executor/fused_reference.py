"""A float32 reference for attention over paged keys and values. Elements of the pages that no
kernel may read are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cuda.page_attention import HeadLayout, PageAttention
from penstock.executor.torch.decoder_layer import DecoderLayer
from penstock.executor.torch.fused_weights import Projection
from penstock.executor.torch.kv_pages import HeadShape, KVPages
from penstock.executor.torch.rotary_table import make_rotary_table

EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The head counts and sizes, the page layout and the attention options of a layer
    under test.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    is_normed: bool = False
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    is_scaled: bool = False

    def __str__(self) -> str:
        extras = f"-w{self.window}" if self.window else ""
        norms = "-normed" if self.is_normed else ""
        kind = str(self.dtype).removeprefix("torch.")
        shape = f"{self.heads}x{self.kv_heads}x{self.head_dim}b{self.block_size}"
        pages = "" if self.page_dtype is None else "-fp8"
        scales = "-scaled" if self.is_scaled else ""
        return f"{shape}{extras}{norms}-{kind}{pages}{scales}"


class AttentionBench:
    """Requests with random keys and values in randomly assigned pages.

    Request i has `totals[i]` tokens. The keys and values of the first `lengths[i]` are in the pages
    at the start; the kernels under test write the others. All other elements of the pages are NaN.
    """

    def __init__(
        self, case: Case, lengths: list[int], totals: list[int], device: torch.device
    ) -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(5)
        self.generator = generator
        widest = -(-max(totals) // case.block_size)
        num_blocks = sum(-(-total // case.block_size) for total in totals) + 3
        shape = HeadShape(num_heads=case.kv_heads, head_dim=case.head_dim)
        self.pages = KVPages(
            (shape,),
            num_blocks=num_blocks,
            block_size=case.block_size,
            dtype=case.page_dtype or case.dtype,
            device=device,
        )
        self.pages.layer(0).fill_(float("nan"))
        scales = torch.rand(2, case.kv_heads, generator=generator) + 0.5
        self.scales = scales.to(device) if case.is_scaled else torch.ones_like(scales).to(device)
        order = torch.randperm(num_blocks, generator=generator).int()
        self.table = torch.full((len(totals), widest), num_blocks - 1, dtype=torch.int32)
        first = 0
        self.past: list[tuple[Tensor, Tensor]] = []
        for slot, (length, total) in enumerate(zip(lengths, totals, strict=True)):
            count = -(-total // case.block_size)
            self.table[slot, :count] = order[first : first + count]
            first += count
            self._write_past(slot, length)
        self.table = self.table.to(device)
        self.norms = (
            (self.random(case.head_dim) + 1, self.random(case.head_dim) + 1)
            if case.is_normed
            else (None, None)
        )
        frequencies = 1.0 / 10_000.0 ** (torch.arange(0, case.head_dim, 2) / case.head_dim)
        self.rotary = make_rotary_table(
            frequencies, 1.25, num_positions=max(totals) + 1, device=device
        )
        self.layout = HeadLayout(
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            scaling=case.head_dim**-0.5,
            eps=EPS,
        )
        self.attention = PageAttention(
            self.layout,
            self.pages,
            self.table,
            self.rotary,
            dtype=case.dtype,
            max_rows=max(len(totals), 8),
            scales=(self.scales,) if case.is_scaled else None,
        )
        self.attention._part_sums.fill_(float("nan"))
        self.attention._part_scales.fill_(float("nan"))
        nothing = Projection(weight=torch.zeros(1), bias=None)
        self.layer = DecoderLayer(
            qkv=nothing,
            out=nothing,
            gate_up=nothing,
            down=nothing,
            input_norm=nothing.weight,
            output_norm=nothing.weight,
            query_norm=self.norms[0],
            key_norm=self.norms[1],
            window=case.window,
        )

    def _write_past(self, slot: int, length: int) -> None:
        case = self.case
        stored = [
            self.random(length, case.kv_heads, case.head_dim).to(self.pages.dtype) for _ in range(2)
        ]
        keys, values = (part.float() * self.scales[i, :, None] for i, part in enumerate(stored))
        self.past.append((keys, values))
        at = torch.arange(length)
        blocks = self.table[slot].long()[at // case.block_size].to(self.device)
        offsets = (at % case.block_size).to(self.device)
        self.pages.layer(0)[blocks, 0, :, offsets] = stored[0]
        self.pages.layer(0)[blocks, 1, :, offsets] = stored[1]

    def _paged(self, values: Tensor, part: int) -> Tensor:
        """Return keys (`part` 0) or values (`part` 1) in float32, rounded to the pages' dtype."""
        scales = self.scales[part, :, None]
        return (values / scales).to(self.pages.dtype).float() * scales

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.to(self.case.dtype).to(self.device)

    def qkv(self, num_tokens: int) -> Tensor:
        width = (self.case.heads + 2 * self.case.kv_heads) * self.case.head_dim
        return self.random(num_tokens, width)

    def expected(self, slot: int, qkv: Tensor, start: int) -> Tensor:
        """Return the attention output [n, Hq * D] of consecutive tokens of one request. `qkv`:
        their queries, keys and values [n, (Hq + 2 * Hkv) * D]; `start`: position of the first
        token.
        """
        case = self.case
        num_tokens = len(qkv)
        heads = qkv.float().view(num_tokens, case.heads + 2 * case.kv_heads, case.head_dim)
        query = self._rotated(heads[:, : case.heads], self.norms[0], start)
        key = self._rotated(heads[:, case.heads : case.heads + case.kv_heads], self.norms[1], start)
        value = heads[:, case.heads + case.kv_heads :]
        keys = torch.cat((self.past[slot][0][:start], self._paged(key, 0)))
        values = torch.cat((self.past[slot][1][:start], self._paged(value, 1)))
        group = case.heads // case.kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1))
        at = torch.arange(len(keys), device=self.device)
        rows = start + torch.arange(num_tokens, device=self.device)[:, None]
        is_seen = at <= rows
        if case.window:
            is_seen &= at > rows - case.window
        weights = (scores * self.layout.scaling).masked_fill(~is_seen, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
        return out.reshape(num_tokens, -1)

    def expected_decodes(self, slots: Sequence[int], qkv: Tensor, starts: Sequence[int]) -> Tensor:
        """Return the attention outputs [n, Hq * D] of one token for each of `slots`. Row i of `qkv`
        [n, (Hq + 2 * Hkv) * D] belongs to `slots[i]`, and `starts[slot]` is the position of the
        slot's token.
        """
        rows = zip(slots, qkv.split(1), strict=True)
        return torch.cat([self.expected(slot, row, starts[slot]) for slot, row in rows])

    def _rotated(self, heads: Tensor, norm: Tensor | None, start: int) -> Tensor:
        if norm is not None:
            scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPS)
            heads = heads * scale * norm.float()
        rows = slice(start, start + len(heads))
        cosines = self.rotary.cosines[rows].repeat(1, 2)[:, None]
        sines = self.rotary.sines[rows].repeat(1, 2)[:, None]
        left, right = heads.chunk(2, -1)
        return heads * cosines + torch.cat((-right, left), -1) * sines


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the error divided by the L2 norm of `expected`; NaN if any value is
    NaN.
    """
    return float((found.float() - expected.float()).norm() / expected.float().norm())
