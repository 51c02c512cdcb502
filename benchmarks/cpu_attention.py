"""Compares the compiled kernels for attention over pages on a CPU with PyTorch's operators.

Measures attention steps in bfloat16 for decode rows of mixed lengths, for one long context and for
chunks of a prompt, with one or several query heads per key head. The steps alternate between 6
layers, so that pages do not stay in the CPU cache. The implementations alternate within one
process. Reports the CPU time of one thread, which other processes affect least. Only the ratios
apply to other machines.

    python benchmarks/cpu_attention.py [--full] [--json FILE]
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np

from usage import needing

with needing("torch"):
    import torch

    from penstock.executor.config import INSTRUCTION_SETS
    from penstock.executor.torch.cpu_kernels import native
    from penstock.executor.torch.cpu_kernels.kernels import PLAIN, load
    from penstock.executor.torch.kv_pages import HeadShape, KVPages
    from penstock.executor.torch.paged_attention import PagedAttention, Scoring
    from penstock.executor.torch.step_inputs import StepInputs

from penstock.scheduler.batch import Batch
from penstock.scheduler.slot_arrays import SlotArrays
from report import Outcome, arguments, at_least, print_rows, run

NUM_LAYERS = 6
BLOCK_SIZE = 16
GOAL_OVER_TORCH = 2.0
CHECKED = "64 decodes, 6 heads of 64"
_OPERATORS = "PyTorch's operators"
_MIXED = tuple((int(n), 1) for n in np.random.default_rng(1).integers(64, 609, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a step.

    `rows`: for each row, the numbers of earlier tokens and of new tokens. `num_heads`: number of KV
    heads. `group`: query heads per KV head. `head_dim`: elements per head.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 6
    group: int = 1
    head_dim: int = 64


SHAPES = {
    CHECKED: Shape(rows=_MIXED),
    "64 decodes, 2 heads of 128, 8 queries each": Shape(
        rows=_MIXED, num_heads=2, group=8, head_dim=128
    ),
    "8 decodes, 6 heads of 64": Shape(rows=_MIXED[:8]),
    "1 decode at 8,192": Shape(rows=((8191, 1),)),
    "a chunk of 512 at 1,024": Shape(rows=((1024, 512),)),
    "8 chunks of 256": Shape(rows=((0, 256),) * 8),
}


class Layers:
    """Runs the attention of one step in every layer, with each implementation."""

    def __init__(self, shape: Shape) -> None:
        starts, counts = np.array(shape.rows, dtype=np.int32).T
        widths = -(-(starts + counts) // BLOCK_SIZE)
        blocks = np.random.default_rng(0).permutation(int(widths.sum())).astype(np.int32)
        longest = int((starts + counts).max())
        arrays = SlotArrays(num_slots=len(starts), max_seq_len=longest, block_size=BLOCK_SIZE)
        for slot, width in enumerate(widths):
            arrays.block_table[slot, :width], blocks = blocks[:width], blocks[width:]
        slots = np.arange(len(starts), dtype=np.int32)
        self._batch = Batch(
            step=0,
            arrays=arrays,
            slots=slots,
            num_tokens=np.ascontiguousarray(counts),
            starts=np.ascontiguousarray(starts),
            num_decodes=int((counts == 1).sum()),
            sampled_slots=slots,
        )
        self._pages = KVPages(
            (HeadShape(num_heads=shape.num_heads, head_dim=shape.head_dim),) * NUM_LAYERS,
            num_blocks=int(widths.sum()),
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        for layer in range(NUM_LAYERS):
            self._pages.layer(layer).normal_()
        num_tokens, num_queries = int(counts.sum()), shape.num_heads * shape.group
        self._query = torch.randn(num_tokens, num_queries, shape.head_dim).bfloat16()
        self._key, self._value = torch.randn(
            2, num_tokens, shape.num_heads, shape.head_dim
        ).bfloat16()
        self._scoring = Scoring(scaling=shape.head_dim**-0.5)
        names = [PLAIN, *filter(native.is_supported, INSTRUCTION_SETS)]
        self.implementations = {
            name: PagedAttention(self._pages, kernels=load(name)) for name in names
        }
        element_bytes = self._pages.dtype.itemsize
        elements = 2 * shape.num_heads * shape.head_dim * int((starts + counts).sum())
        self.num_bytes = NUM_LAYERS * elements * element_bytes

    def seconds(self, name: str) -> float:
        """Return the thread's CPU time for one step, seconds, including the preparation of
        inputs.
        """
        attention, start = self.implementations[name], time.thread_time()
        step = StepInputs(self._batch, self._pages, num_embeddings=10, overhead_blocks=170.0)
        for layer in range(NUM_LAYERS):
            attention.attend(layer, step, self._query, self._key, self._value, self._scoring)
        return time.thread_time() - start


def measured(shape: Shape, rounds: int) -> tuple[dict[str, float], int]:
    """Return the median CPU time of a step, seconds, by implementation, and the bytes of keys and
    values that a step reads.
    """
    layers = Layers(shape)
    times: dict[str, list[float]] = {name: [] for name in layers.implementations}
    for _ in range(rounds + 1):
        for name, taken in times.items():
            taken.append(layers.seconds(name))
    return {name: float(np.median(taken[1:])) for name, taken in times.items()}, layers.num_bytes


def measure(options: Namespace) -> Outcome:
    """Measure all shapes."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for title, shape in SHAPES.items():
            medians, num_bytes = measured(shape, rounds=15 if options.full else 5)
            rows += [
                {
                    "step": title,
                    "way": _OPERATORS if name == PLAIN else name,
                    "ms": seconds * 1e3,
                    "GB/s of keys and values": num_bytes / seconds / 1e9,
                    "over PyTorch": medians[PLAIN] / seconds,
                }
                for name, seconds in medians.items()
            ]
    print_rows("Attention of six layers, one thread", rows)
    ratio = max(row["over PyTorch"] for row in rows if row["step"] == CHECKED)
    name = f"kernels over PyTorch's operators, {CHECKED}"
    return rows, [at_least(name, ratio, GOAL_OVER_TORCH, "x")]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
