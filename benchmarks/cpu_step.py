"""Measures the parts of a decode step's time on a CPU, and compares them with lower bounds.

Steps the engine directly, with the eager path (PyTorch modules) and with the fused path (joined,
packed weights and compiled kernels), for a Llama with random weights and concurrent requests with a
context of about 352 tokens. Parts: the scheduler (the whole step except the executor); sampling;
all layers, if one call runs them; otherwise ("by operator") the matrix products of linear layers,
attention over pages, and other kernels; and the rest: small operators, their launch overhead,
packing. The number of operators is from PyTorch's profiler. The lower bounds are the bytes of
weights, keys and values divided by the speed of a copy, and the operations of the matrix products
divided by the speed of a large matrix product; both speeds are measured with the same threads.
"processor": the CPU time of all threads, including busy waiting. With one thread every figure is
CPU time, which other processes hardly affect. Only the ratios apply to other machines.

    python benchmarks/cpu_step.py [--shape 13.8M|91M] [--threads N] [--full] [--json FILE]
"""

from __future__ import annotations

import functools
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# First: reports missing packages, and sets how threads wait, before torch is loaded.
from engine_cpu import SHAPES, VOCAB_SIZE, EngineRun, build_model
from usage import needing

with needing("torch"):
    import torch
    from torch.nn.functional import linear
    from torch.profiler import ProfilerActivity, profile

    from penstock.executor.torch import computed_step
    from penstock.executor.torch.cpu.fused_path import fused_path
    from penstock.executor.torch.cpu_kernels import kernels as kernel_module
    from penstock.executor.torch.cpu_kernels.native import NativeKernels
    from penstock.executor.torch.cpu_kernels.packed_linear import PackedLinear
    from penstock.executor.torch.executor import TorchExecutor
    from penstock.executor.torch.loading import load_configured
    from penstock.executor.torch.paged_attention import PagedAttention
    from penstock.executor.torch.prepacked_linear import PrepackedLinear, can_prepack

from penstock.executor.config import ExecutorConfig
from report import Outcome, arguments, print_rows, run

CONTEXT = 352
RUNNING = (1, 8, 64)
CAUSES = ("scheduler", "sampling", "layers", "linears", "attention", "other kernels", "rest")
CAUSE_OF = {"attend": "attention", "bf16_linear": "packed", "int8_linear": "packed"}
"""Kernel call -> part of the step. "packed" is not displayed: such a call is part of a packed
linear layer, which is timed as a whole.
"""
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}
BY_OPERATOR = ", by operator"
PATHS: dict[str, dict[str, str]] = {
    "eager": {},
    "fused" + BY_OPERATOR: {},
    "fused": {},
    "fused, int8" + BY_OPERATOR: INT8,
    "fused, int8": INT8,
}
"""The measured paths and their settings."""


class Stopwatch:
    """Sums the time of wrapped calls by cause (a part of the step), in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrapped(self, call: Callable[..., Any], cause: str) -> Callable[..., Any]:
        """Return `call` wrapped so that its time is added to `cause`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[cause] += self.clock() - begun

        return timed


class TimedKernels:
    """Wraps the compiled kernels, or one layer's attention, to time every call."""

    def __init__(self, kernels: Any, watch: Stopwatch) -> None:
        self._kernels = kernels
        self._watch = watch

    def _timed_layer(self, *args: Any, **named: Any) -> Any:
        return TimedKernels(self._kernels.layer(*args, **named), self._watch)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if name == "layer":
            return self._timed_layer
        if not callable(found):
            return found
        timed = self._watch.wrapped(found, CAUSE_OF.get(name, "other kernels"))
        setattr(self, name, timed)
        return timed


def build_engine(folder: Path, watch: Stopwatch, name: str) -> EngineRun:
    """Build an engine whose executor, kernels and sampler are timed."""
    settings: Any = PATHS[name]
    config = ExecutorConfig(
        model_path=folder, max_num_seqs=max(RUNNING), max_seq_len=768, **settings
    )
    model = load_configured(config)
    kernels: Any = kernel_module.load()
    if name.endswith(BY_OPERATOR):
        kernels = TimedKernels(kernels, watch)
    path = None if name == "eager" else fused_path(config, model, kernels)
    executor: Any = TorchExecutor(config, model, path)
    executor.launch = watch.wrapped(executor.launch, "executor")
    return EngineRun(executor, budget=2048)


def measured(
    run: EngineRun, watch: Stopwatch, num_running: int, num_steps: int
) -> dict[str, float]:
    """Return the figures of a decode step: the mean time of each of `CAUSES`, the mean and the
    median time of the whole step, and its CPU time ("processor"), all in milliseconds; and its
    number of operators.
    """
    random = np.random.default_rng(0)
    first = CONTEXT - num_steps
    for _ in range(num_running):
        run.add(0, random.integers(3, VOCAB_SIZE, first).tolist(), 3 * num_steps + 8)
    while len(run.engine.step().tokens) < num_running:
        pass
    walls: list[float] = []
    watch.seconds.clear()
    busy = time.process_time()
    for _ in range(num_steps):
        begun = watch.clock()
        run.engine.step()
        walls.append(watch.clock() - begun)
    busy = time.process_time() - busy
    spent: defaultdict[str, float] = defaultdict(float)
    for cause, seconds in watch.seconds.items():
        spent[cause] = seconds / num_steps
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            run.engine.step()
    while run.engine.has_work:
        run.engine.step()
    num_ops = sum(row.count for row in profiled.key_averages())
    step = float(np.mean(walls))
    spent["scheduler"] = step - spent["executor"]
    spent["rest"] = step - sum(spent[cause] for cause in CAUSES if cause != "rest")
    return {cause: spent[cause] * 1e3 for cause in CAUSES} | {
        "step": step * 1e3,
        "step p50": float(np.median(walls)) * 1e3,
        "processor": busy / num_steps * 1e3,
        "operators": num_ops / num_steps,
    }


def lower_bounds(shape: str, num_running: int, *, is_int8: bool) -> dict[str, float]:
    """Return two lower bounds of a step's time, ms, from speeds measured on this machine: "bytes"
    for memory traffic, and "products" for matrix products.
    """
    hidden, num_layers, feed_forward = SHAPES[shape]
    num_weights = num_layers * hidden * (4 * hidden + 3 * feed_forward) + VOCAB_SIZE * hidden
    num_kv_bytes = num_running * CONTEXT * num_layers * 2 * hidden * 2
    num_bytes = 2 * num_weights + num_kv_bytes
    return {
        "bytes": num_bytes / (2 if is_int8 else 1) / copy_speed() * 1e3,
        "products": 2 * num_weights * num_running / product_speed() * 1e3,
    }


@functools.cache
def copy_speed() -> float:
    """Return bytes per second, read and written, of a copy."""
    source = torch.zeros(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * len(source) / _fastest(lambda: target.copy_(source))


@functools.cache
def product_speed() -> float:
    """Return operations per second of a packed bfloat16 matrix product that uses all threads; of a
    float32 product if the processor does not support bfloat16."""
    has_bf16 = can_prepack()
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    weight, x = torch.zeros(2048, 2048, dtype=dtype), torch.zeros(256, 2048, dtype=dtype)
    packed = PrepackedLinear(weight, None) if has_bf16 else functools.partial(linear, weight=weight)
    return 2 * 256 * 2048**2 / _fastest(lambda: packed(x))


def _fastest(run: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(12):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def measure(options: Namespace) -> Outcome:
    """Measure all paths at every number of running requests."""
    if options.threads:
        torch.set_num_threads(options.threads)
    watch = Stopwatch(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    for owner, name, cause in (
        (computed_step, "sample", "sampling"),
        (PrepackedLinear, "__call__", "linears"),
        (PagedAttention, "attend", "attention"),
        (NativeKernels, "run_layers", "layers"),
        (PackedLinear, "__call__", "linears"),
    ):
        setattr(owner, name, watch.wrapped(getattr(owner, name), cause))
    num_steps = 40 if options.full else 12
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        build_model(Path(folder), options.shape)
        engines = {name: build_engine(Path(folder), watch, name) for name in PATHS}
        for num_running in RUNNING:
            for name, engine in engines.items():
                bounds = lower_bounds(options.shape, num_running, is_int8="int8" in name)
                found = measured(engine, watch, num_running, num_steps)
                rows.append({"path": name, "running": num_running, **found, **bounds})
    title = f"A decode step at {options.shape} on {torch.get_num_threads()} threads, ms"
    print_rows(title, rows)
    return rows, []


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="13.8M", help="parameters")
    parser.add_argument("--threads", type=int, help="threads that compute")
    run(parser, measure)


if __name__ == "__main__":
    main()
