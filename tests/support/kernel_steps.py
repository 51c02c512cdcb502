"""Builds inputs for the CPU kernels, and computes the expected outputs.

The keys and values of the rows lie in shuffled pages. All other values in the pages are NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.executor.torch.cpu_kernels.kernels import PLAIN, LayerAttention, load
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.kv_pages import SCALE_BYTES

DECODES_AND_CHUNKS = (
    (0, 1),
    (15, 1),
    (16, 1),
    (9, 0),
    (130, 1),
    (0, 33),
    (40, 21),
    (7, 3),
    (63, 66),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The rows of a step and the shape of a layer's attention.

    `rows`: (start position, number of tokens) of each row. `heads`: number of key heads; `group`:
    number of query heads for each key head. `window`, `softcap`: 0 for none.
    """

    rows: tuple[tuple[int, int], ...] = DECODES_AND_CHUNKS
    heads: int = 2
    group: int = 1
    dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_int8: bool = False


class Step:
    """A step whose random keys and values lie in shuffled blocks of the pages, one of them the last
    block. All other values in the pages are NaN; in 8-bit pages, all other scales are NaN.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        self.case, self.dtype = case, dtype
        self.num_heads = case.heads * case.group
        starts, counts = np.array(case.rows, dtype=np.int32).T
        self.ends = (starts + counts).tolist()
        widths = [-(-end // case.block_size) for end in self.ends]
        num_blocks = sum(widths) + 3
        shuffled = np.random.default_rng(0).permutation(num_blocks)[::-1].astype(np.int32)
        shuffled[np.argmax(shuffled)], shuffled[0] = shuffled[0], num_blocks - 1
        # After the end of a sequence, its table has a block number that is out of range.
        table = np.full((len(widths) + 1, max(widths) + 1), 1 << 30, dtype=np.int32)
        self.slots = np.arange(len(widths), dtype=np.int32)[::-1] + 1
        for slot, width in zip(self.slots, widths, strict=True):
            table[slot, :width], shuffled = shuffled[:width], shuffled[width:]
        self.table = table
        head = (num_blocks, 2, case.heads, case.block_size)
        if case.is_int8:
            self.pages = torch.full((*head, case.dim + SCALE_BYTES), -1, dtype=torch.int8)
        else:
            self.pages = torch.full((*head, case.dim), float("nan"), dtype=dtype)
        self.num_tokens = int(counts.sum())
        self.rows = self._rows(counts, starts)
        self.keys = [torch.randn(end, case.heads, case.dim).to(dtype) for end in self.ends]
        self.values = [torch.randn(end, case.heads, case.dim).to(dtype) for end in self.ends]
        self.sinks = torch.randn(self.num_heads) * 2 if case.has_sinks else None
        self.scaling = 1.5 / case.dim**0.5

    def layer(self, instructions: str | None = None) -> LayerAttention:
        return load(instructions).layer(
            self.pages,
            num_heads=self.num_heads,
            scaling=self.scaling,
            window=self.case.window,
            softcap=self.case.softcap,
            sinks=self.sinks,
            dtype=self.dtype,
        )

    def query(self) -> Tensor:
        return torch.randn(self.num_tokens, self.num_heads, self.case.dim).to(self.dtype)

    def attend(self, instructions: str, query: Tensor) -> Tensor:
        out = torch.empty_like(query)
        self.layer(instructions).attend(self.rows, query, out)
        return out

    def fill(self) -> None:
        """Write the keys and values that the rows may read; keys and values outside the window stay
        NaN.
        """
        window = self.case.window
        firsts = [max(start + 1 - window, 0) if window else 0 for start, _ in self.case.rows]
        counts = [end - first for end, first in zip(self.ends, firsts, strict=True)]
        key, value = (
            torch.cat([rows[first:] for rows, first in zip(every, firsts, strict=True)])
            for every in (self.keys, self.values)
        )
        self.layer(PLAIN).write(self._rows(counts, firsts), key, value)

    def expected(self, query: Tensor) -> Tensor:
        """Return the attention output, computed token by token, float64 [tokens, query heads,
        dim].
        """
        case, out, packed = self.case, [], 0
        for row, (start, count) in enumerate(case.rows):
            keys = self.keys[row].double().repeat_interleave(case.group, 1)
            values = self.values[row].double().repeat_interleave(case.group, 1)
            for position in range(start, start + count):
                seen = slice(max(position + 1 - case.window, 0) if case.window else 0, position + 1)
                scores = torch.einsum("hd,khd->hk", query[packed].double(), keys[seen])
                scores *= self.scaling
                if case.softcap:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
                weights = scores.softmax(-1)[:, : position + 1 - seen.start]
                out.append(torch.einsum("hk,khd->hd", weights, values[seen]))
                packed += 1
        return torch.stack(out)

    def _rows(self, counts: Sequence[int], starts: Sequence[int]) -> StepRows:
        num_tokens = np.array(counts, dtype=np.int32)
        rows = StepRows()
        rows.set(
            first_tokens=np.cumsum(num_tokens, dtype=np.int32) - num_tokens,
            num_tokens=num_tokens,
            starts=np.array(starts, dtype=np.int32),
            slots=self.slots,
            block_table=self.table,
        )
        return rows
