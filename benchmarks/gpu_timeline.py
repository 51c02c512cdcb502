"""The kernels of whole turns as the device ran them.

Owns the reading of PyTorch's profiler. Times are microseconds since the first turn's begin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_engine import CONTEXT, DRAWN, NUM_WARM, Load
from penstock.scheduler.executor import Executor

_NUM_TURNS, _FIRST, _LAST = 8, 4, 5
"""The profiler's own first events are slow: two turns in the middle are kept."""


def timeline(executor: Executor, num_rows: int) -> dict[str, Any]:
    """`names`; `kernels` and `turns`: (index of the name or number of the turn, start, length)."""
    load = Load(executor)
    load.submit(num_rows, CONTEXT - NUM_WARM, 2 * NUM_WARM + 2 * _NUM_TURNS, DRAWN)
    load.until_all_decode()
    for _ in range(NUM_WARM):
        load.turn()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for turn in range(_NUM_TURNS):
            with record_function(f"turn {turn}"):
                load.turn()
        torch.cuda.synchronize()
    load.stop()
    turns: list[tuple[int, float, float]] = []
    kernels: list[tuple[str, float, float]] = []
    for event in found.events() or ():
        begun, length = event.time_range.start, event.time_range.elapsed_us()
        if event.device_type.name == "CUDA":
            if not event.name.startswith("turn "):  # the profiler shows ranges there too
                kernels.append((event.name, begun, length))
        elif event.name.startswith("turn "):
            turns.append((int(event.name[5:]), begun, length))
    kept = [turn for turn in turns if _FIRST <= turn[0] <= _LAST]
    origin, end = kept[0][1], kept[-1][1] + kept[-1][2]
    inside = sorted((one for one in kernels if origin <= one[1] < end), key=lambda one: one[1])
    names = sorted({name for name, _, _ in inside})
    return {
        "num_rows": num_rows,
        "names": [name[:80] for name in names],
        "turns": [(turn, round(begun - origin, 1), round(took, 1)) for turn, begun, took in kept],
        "kernels": [
            (names.index(name), round(begun - origin, 1), round(took, 1))
            for name, begun, took in inside
        ],
    }
