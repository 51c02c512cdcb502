"""Measures the torch executor on one GPU, and compares it with goals and with figures of vLLM.

Uses two models with random weights in bfloat16, created here: 1B (16 layers, hidden 2048, 32/8
heads x 64, vocabulary 128,256, tied) and 8B (32 layers, hidden 4096, 32/8 heads x 128). Sections:
`decode` (steps of requests with a context of 640 tokens), `mixed` (steps of such requests and a
prefill chunk of 512 tokens after 2,048), `long` (one request at 32k, divided by one at 640),
`prefill`, `offline` (256 requests of 512 + 256 tokens), `sampling` (some options one by one, and
all together, divided by greedy decoding), `first` (the first request after start, divided by later
ones), `timeline` (the kernels of two steps, from the profiler), `served` (`penstock serve` with 256
streams) and `curve` (the same with 1 to 256 streams). The vLLM column is not measured here: it
contains figures of vLLM 0.20.2, recorded on an H200.

    python benchmarks/gpu.py [--only SECTION]... [--shapes 1B,8B] [--models DIR] [--json FILE]
        [--quantization fp8] [--kv-cache-dtype fp8]
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from usage import needing

with needing("torch"):
    import torch

    import gpu_engine as engine
    from gpu_models import SHAPES, model_folder

from penstock.executor.config import KV_CACHE_DTYPES, QUANTIZATIONS
from penstock.executor.device_defaults import device_defaults
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import SamplingParams
from report import Check, arguments, at_least, at_most, print_checks, print_table, write_json
from served_model import Load, Wave, curve, served
from services import Service, service

SECTIONS = (
    "first",
    "decode",
    "sampling",
    "mixed",
    "long",
    "prefill",
    "offline",
    "timeline",
    "served",
    "curve",
)
STREAMS = (1, 8, 32, 64, 128, 256)
LOAD = Load(num_prompt=512, num_new=256, vocab_size=128_256)
ROWS = {"1B": (1, 32, 256), "8B": (1, 32, 128), "quick": (1, 8)}
ALL_OPTIONS = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias=((5, 1.0), (9, -2.0)),
    num_logprobs=5,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValues:
    """Reference values of a figure: vLLM's, recorded on an H200, and the goal; None if there is
    none.
    """

    vllm: float | None = None
    goal: float | None = None


MARKS: dict[str, ReferenceValues] = {
    "1B turn, 1 running": ReferenceValues(vllm=3.05, goal=0.95),
    "1B turn, 32 running": ReferenceValues(vllm=2.28, goal=1.3),
    "1B turn, 256 running": ReferenceValues(vllm=5.81, goal=2.8),
    "8B turn, 1 running": ReferenceValues(vllm=6.05, goal=4.2),
    "8B turn, 32 running": ReferenceValues(vllm=5.90, goal=5.2),
    "8B turn, 128 running": ReferenceValues(vllm=9.05, goal=7.7),
    "8B fp8 turn, 1 running": ReferenceValues(goal=2.9),
    "8B fp8 turn, 32 running": ReferenceValues(goal=3.8),
    "8B fp8 turn, 128 running": ReferenceValues(goal=5.9),
    "8B fp8 offline, 256 x (512, 256)": ReferenceValues(goal=15_000),
    "8B mixed turn, 32 + 512 over 2k": ReferenceValues(goal=17.3),
    "8B turn at 32k over at 640": ReferenceValues(goal=1.5),
    "1B prefill": ReferenceValues(vllm=255_400, goal=275_000),
    "8B prefill": ReferenceValues(vllm=44_000, goal=45_000),
    "1B offline, 256 x (512, 256)": ReferenceValues(vllm=32_837, goal=54_000),
    "8B offline, 256 x (512, 256)": ReferenceValues(vllm=8_628, goal=10_500),
    "1B served, 256 streams": ReferenceValues(vllm=22_360, goal=52_000),
    "1B served TTFT p50": ReferenceValues(vllm=432, goal=280),
    "1B served ITL p99": ReferenceValues(vllm=32.6, goal=16),
    "1B served over offline": ReferenceValues(vllm=0.68, goal=0.96),
    "8B served, 256 streams": ReferenceValues(vllm=9_869, goal=10_500),
    "8B served TTFT p50": ReferenceValues(vllm=1_754, goal=1_600),
    "8B served ITL p99": ReferenceValues(vllm=200, goal=100),
    "1B every sampling option over greedy, 256 running": ReferenceValues(goal=1.15),
    "1B first request over later ones, TTFT": ReferenceValues(goal=1.5),
    "1B served, first request over later ones, TTFT": ReferenceValues(goal=1.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured figure: name, value and unit."""

    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Results:
    """The measured figures, in order, and the timelines by shape."""

    figures: list[Figure] = field(default_factory=list)
    timelines: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str) -> None:
        """Record a figure and print it immediately, so that an interrupted run still reports it."""
        self.figures.append(Figure(name=name, value=value, unit=unit))
        print(f"{name}: {value:,.3f} {unit}", flush=True)

    def value_of(self, name: str) -> float | None:
        """Return a figure by name; None if it was not measured."""
        return next((found.value for found in self.figures if found.name == name), None)

    def checks(self) -> list[Check]:
        """Return the checks of all figures that have a goal."""
        return [
            _judge_of(found)(found.name, found.value, goal, found.unit)
            for found in self.figures
            if (goal := MARKS.get(found.name, ReferenceValues()).goal) is not None
        ]

    def print(self) -> None:
        """Print all figures, with vLLM's recorded ones and the goals."""
        rows: list[tuple[object, ...]] = []
        for found in self.figures:
            mark = MARKS.get(found.name, ReferenceValues())
            others = [("-" if x is None else x) for x in (mark.vllm, mark.goal)]
            rows.append((found.name, found.value, found.unit, *others))
        header = ("figure", "here", "unit", "vLLM, recorded", "goal")
        print_table("One GPU", header, rows)


def _judge_of(found: Figure) -> Callable[[str, float, float, str], Check]:
    is_rate = found.unit == "tokens/s" or found.name.endswith("over offline")
    return at_least if is_rate else at_most


def _rows(shape: str) -> tuple[int, ...]:
    return ROWS[shape.split()[0]]


def measure_first(results: Results, executor: Executor, shape: str) -> None:
    """Compare the first request's TTFT with the TTFT of later requests."""
    first, *later = engine.first_tokens_ms(executor)
    usual = statistics.median(later)
    results.add(f"{shape} first request over later ones, TTFT", first / usual, "x")


def measure_decode(results: Results, executor: Executor, shape: str) -> None:
    """Measure engine steps that decode at temperature 1."""
    for num_rows in _rows(shape):
        taken_ms = engine.decode_step_ms(executor, num_rows, engine.DRAWN, engine.CONTEXT)
        results.add(f"{shape} turn, {num_rows} running", taken_ms, "ms")


def measure_sampling(results: Results, executor: Executor, shape: str) -> None:
    """Compare all sampling options together, and some of them separately, with greedy decoding."""
    num_rows = _rows(shape)[-1]
    kinds = {
        "top_p 0.95": SamplingParams(top_p=0.95),
        "top_k 50": SamplingParams(top_k=50),
        "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1),
        "every sampling option": ALL_OPTIONS,
    }
    greedy_ms = engine.decode_step_ms(executor, num_rows, engine.GREEDY, engine.CONTEXT)
    for name, sampling in kinds.items():
        taken_ms = engine.decode_step_ms(executor, num_rows, sampling, engine.CONTEXT)
        results.add(f"{shape} {name} over greedy, {num_rows} running", taken_ms / greedy_ms, "x")


def measure_mixed(results: Results, executor: Executor, shape: str) -> None:
    """Measure steps with decodes and one prefill chunk."""
    num_rows = _rows(shape)[1]
    taken_ms = engine.mixed_step_ms(executor, num_rows)
    results.add(f"{shape} mixed turn, {num_rows} + 512 over 2k", taken_ms, "ms")


def measure_long(results: Results, executor: Executor, shape: str) -> None:
    """Compare the step time of one request at a context of 32k tokens with that at 640."""
    short_ms = engine.decode_step_ms(executor, 1, engine.DRAWN, engine.CONTEXT)
    long_ms = engine.decode_step_ms(executor, 1, engine.DRAWN, 32_768)
    results.add(f"{shape} turn at 32k over at 640", long_ms / short_ms, "x")


def measure_prefill(results: Results, executor: Executor, shape: str) -> None:
    """Measure the prefill rate of prompts that generate one token each."""
    results.add(f"{shape} prefill", engine.prefill_rate(executor), "tokens/s")


def measure_offline(results: Results, executor: Executor, shape: str) -> None:
    """Measure the throughput of requests that are all submitted at the start."""
    rate = engine.offline_rate(executor, count=256, num_prompt=512, num_new=256)
    results.add(f"{shape} offline, 256 x (512, 256)", rate, "tokens/s")


def measure_timeline(results: Results, executor: Executor, shape: str) -> None:
    """Record the kernels of two steps with the profiler."""
    results.timelines[shape] = engine.timeline(executor, ROWS[shape.split()[0]][-1])


IN_PROCESS: dict[str, Callable[[Results, Executor, str], None]] = {
    "first": measure_first,
    "decode": measure_decode,
    "sampling": measure_sampling,
    "mixed": measure_mixed,
    "long": measure_long,
    "prefill": measure_prefill,
    "offline": measure_offline,
    "timeline": measure_timeline,
}


def _service(folder: Path, settings: Sequence[str]) -> AbstractContextManager[Service]:
    """Start a service; settings not given are the defaults for a GPU."""
    return service("--model", str(folder), "--device", "cuda", *settings, num_fronts=None)


def measure_served(
    results: Results, folder: Path, shape: str, settings: Sequence[str], *, num_waves: int
) -> None:
    """Measure the service with 256 streams; report the best of `num_waves` waves, because the first
    one also warms up the clients.
    """

    async def run() -> tuple[list[Wave], list[float]]:
        with _service(folder, settings) as serving:
            return await served(serving, LOAD, 256, num_waves=num_waves)

    waves, singles = asyncio.run(run())
    first, *later = singles
    results.add(
        f"{shape} served, first request over later ones, TTFT",
        first / statistics.median(later),
        "x",
    )
    best = max(waves, key=lambda wave: wave.tokens_per_s)
    results.add(f"{shape} served, 256 streams", best.tokens_per_s, "tokens/s")
    results.add(f"{shape} served TTFT p50", best.ttft_p50_ms, "ms")
    results.add(f"{shape} served ITL p50", best.itl_p50_ms, "ms")
    results.add(f"{shape} served ITL p99", best.itl_p99_ms, "ms")
    offline = results.value_of(f"{shape} offline, 256 x (512, 256)")
    if offline is not None:
        results.add(f"{shape} served over offline", best.tokens_per_s / offline, "x")


def measure_curve(results: Results, folder: Path, shape: str, settings: Sequence[str]) -> None:
    """Measure the service with each number of streams in `STREAMS`."""

    async def run() -> dict[int, Wave]:
        with _service(folder, settings) as serving:
            return await curve(serving, LOAD, STREAMS)

    found = asyncio.run(run())
    for count, wave in found.items():
        results.add(f"{shape} curve, {count} streams", wave.tokens_per_s, "tokens/s")
        results.add(f"{shape} curve TTFT p50, {count} streams", wave.ttft_p50_ms, "ms")
        results.add(f"{shape} curve ITL p50, {count} streams", wave.itl_p50_ms, "ms")


@contextlib.contextmanager
def models_in(parent: Path | None) -> Generator[Path]:
    """Yield `parent`, or a temporary folder for models if it is None."""
    if parent is not None:
        yield parent
        return
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as made:
        yield Path(made)


def _label(shape: str, quantization: str, kv_cache_dtype: str) -> str:
    """Return the name of the shape with its 8-bit settings, such as "8B fp8"."""
    parts = [
        shape,
        *([quantization] if quantization != "none" else []),
        *([f"{kv_cache_dtype}-KV"] if kv_cache_dtype != "auto" else []),
    ]
    return " ".join(parts)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section alone")
    parser.add_argument("--shapes", default="1B,8B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--models", type=Path, help="folder to keep the models in")
    usual = device_defaults("cuda").max_num_batched_tokens
    parser.add_argument("--budget", type=int, default=usual, help="tokens of a served step")
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device")
    sections = options.only or SECTIONS
    settings = (
        *("--quantization", options.quantization, "--kv-cache-dtype", options.kv_cache_dtype),
        *("--max-num-batched-tokens", str(options.budget)),
    )
    results = Results()
    with models_in(options.models) as parent:
        for shape in options.shapes.split(","):
            folder = model_folder(parent, shape)
            label = _label(shape, options.quantization, options.kv_cache_dtype)
            if inside := [name for name in SECTIONS if name in sections and name in IN_PROCESS]:
                executor = engine.build(
                    folder,
                    quantization=options.quantization,
                    kv_cache_dtype=options.kv_cache_dtype,
                )
                print(f"{label}: {executor.info.resources or executor.info}", flush=True)
                for name in inside:
                    IN_PROCESS[name](results, executor, label)
                executor.close()
                del executor
                torch.cuda.empty_cache()
            if "served" in sections:
                num_waves = 4 if options.full else 2
                measure_served(results, folder, label, settings, num_waves=num_waves)
            if "curve" in sections:
                measure_curve(results, folder, label, settings)
    results.print()
    checks = results.checks()
    print_checks(checks)
    figures = [asdict(found) for found in results.figures]
    write_json(options.json, {"figures": figures, "timelines": results.timelines}, checks)


if __name__ == "__main__":
    main()
