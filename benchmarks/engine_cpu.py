"""The engine on the CPU compared with its components: tokens per second and latency.

Workload: 64 requests, prompts of 64 to 512 random tokens, 128 new tokens each, greedy, no end
token, a Llama of 13.8 or 91 million parameters with random weights in bfloat16. Four
implementations alternate within one process: Penstock's engine (scheduler, pages, torch executor)
with the fused path and with the eager path, `transformers` generate with one padded batch, and a
plain PyTorch loop with a dense cache (the lower bound for PyTorch's operators). Then the latency of
both paths in closed loops with a concurrency of 1, 8, 32 and 64. Only the ratios apply to other
machines.

    python benchmarks/engine_cpu.py [--shape 13.8M|91M] [--threads N] [--int8] [--full]
        [--json FILE]
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.executor.torch.thread_environment import plan_threads

# Before torch is loaded, as in the service.
_plan = plan_threads(
    num_cores=len(os.sched_getaffinity(0)), num_fronts=0, num_threads=None, environ=os.environ
)
os.environ.update({**_plan.environment, **os.environ})

import numpy as np

from usage import needing

with needing("torch"):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from dense_llama import DenseLlama
    from penstock.executor.torch.create import create_torch_executor
    from penstock.executor.torch.executor import TorchExecutor

from penstock.executor.config import ExecutorConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import RequestSpec, SamplingParams
from report import arguments, at_least, conclude, print_table

NUM_REQUESTS = 64
NUM_NEW_TOKENS = 128
VOCAB_SIZE = 8192
CONCURRENCIES = (1, 8, 32, 64)
GOAL_OVER_GENERATE = 2.2
MARKS = {"vLLM 0.32 on the CPU": 1600.0, "OpenVINO GenAI 2026.4": 2000.0}
"""Output tokens per second of other engines with this workload on a machine with two such cores."""


SHAPES = {"13.8M": (384, 6, 1024), "91M": (768, 12, 2048)}
"""Hidden size, number of layers (heads have 64 elements), size of the feed-forward network."""


def build_model(folder: Path, shape: str = "13.8M") -> None:
    """Write a model of the given shape with random weights."""
    torch.manual_seed(0)
    hidden, num_layers, feed_forward = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of 64 to 512 random tokens, the same on every call."""
    random = np.random.default_rng(0)
    lengths = random.integers(64, 513, count)
    return [random.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


@dataclass(slots=True)
class Latency:
    """Latencies of all requests of a run, in seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    num_tokens: int = 0


class EngineRun:
    """Drives an engine with a bounded number of requests at a time."""

    def __init__(self, executor: Executor, budget: int) -> None:
        config = SchedulerConfig(max_num_batched_tokens=budget)
        self.engine = Engine(executor, config, time.monotonic)
        self._next_key = 1

    def __call__(
        self, prompts: list[list[int]], num_new: int, concurrency: int, temperature: float = 0.0
    ) -> Latency:
        """Run all prompts with `concurrency` requests in flight."""
        latency = Latency()
        waiting = list(reversed(prompts))
        submitted: dict[int, float] = {}
        last: dict[int, float] = {}
        start = time.perf_counter()
        while waiting or submitted:
            while waiting and len(submitted) < concurrency:
                submitted[self.submit(waiting.pop(), num_new, temperature)] = time.perf_counter()
            events = self.engine.step()
            now = time.perf_counter()
            for key in events.keys.tolist():
                if key in last:
                    latency.itl.append(now - last[key])
                else:
                    latency.ttft.append(now - submitted[key])
                last[key] = now
            latency.num_tokens += len(events.tokens)
            for end in events.ends:
                del submitted[end.key]
        latency.elapsed = time.perf_counter() - start
        return latency

    def submit(self, prompt: list[int], num_new: int, temperature: float = 0.0) -> int:
        """Submit one request with a fixed output length, greedy by default; return its key."""
        key = self._next_key
        self._next_key += 1
        spec = RequestSpec(
            key=key,
            request_id=str(key),
            prompt_ids=np.array(prompt, dtype=np.int32),
            max_tokens=num_new,
            sampling=SamplingParams(temperature=temperature),
            arrival_s=time.monotonic(),
        )
        self.engine.submit((spec,))
        return key


def generate_static(model: Any, prompts: list[list[int]], num_new: int) -> int:
    """Run `transformers` generate over one left-padded batch; return the new tokens."""
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
    return int((out.shape[1] - longest) * len(prompts))


def throughput(
    runs: dict[str, Callable[[list[list[int]], int], int]], rounds: int
) -> dict[str, list[float]]:
    """Return output tokens per second of every implementation, measured alternately."""
    prompts = make_prompts(NUM_REQUESTS)
    for run in runs.values():
        run(prompts[:16], 4)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            num_tokens = run(prompts, NUM_NEW_TOKENS)
            rates[name].append(num_tokens / (time.perf_counter() - start))
    return rates


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return float(p50), float(p99)


def report_latency(engines: dict[str, EngineRun], *, is_full: bool) -> list[dict[str, object]]:
    """Run a closed loop at every concurrency, the engines alternating; report latencies."""
    results: list[dict[str, object]] = []
    num_new = NUM_NEW_TOKENS if is_full else NUM_NEW_TOKENS // 4
    for concurrency, (name, engine) in itertools.product(CONCURRENCIES, engines.items()):
        count = max(concurrency * (4 if is_full else 2), 12 if is_full else 6)
        latency = engine(make_prompts(count), num_new, concurrency)
        (ttft_50, ttft_99), (itl_50, itl_99) = percentiles(latency.ttft), percentiles(latency.itl)
        results.append(
            {
                "way": name,
                "concurrency": concurrency,
                "requests": count,
                "tokens_per_s": latency.num_tokens / latency.elapsed,
                "ttft_p50_ms": ttft_50,
                "ttft_p99_ms": ttft_99,
                "itl_p50_ms": itl_50,
                "itl_p99_ms": itl_99,
            }
        )
    columns = list(results[0])
    print_table("Closed loop", columns, [[row[column] for column in columns] for row in results])
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one step at most")
    parser.add_argument("--shape", choices=list(SHAPES), default="13.8M", help="parameters")
    parser.add_argument("--threads", type=int, help="threads that compute")
    parser.add_argument("--int8", action="store_true", help="the fused path all in 8 bits")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = Path(folder)
        build_model(path, options.shape)
        config = ExecutorConfig(model_path=path, max_num_seqs=NUM_REQUESTS, max_seq_len=768)
        settings: dict[str, Any] = (
            {"quantization": "int8", "kv_cache_dtype": "int8"} if options.int8 else {}
        )
        engine = EngineRun(create_torch_executor(replace(config, **settings)), options.budget)
        eager = EngineRun(TorchExecutor(config), options.budget)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        dense = DenseLlama(model)

        def run_dense(prompts: list[list[int]], num_new: int) -> int:
            return sum(map(len, dense.generate(prompts, num_new)))

        rates = throughput(
            {
                "engine": lambda prompts, new: engine(prompts, new, NUM_REQUESTS).num_tokens,
                "engine, eager path": lambda prompts, new: (
                    eager(prompts, new, NUM_REQUESTS).num_tokens
                ),
                "static generate": lambda prompts, new: generate_static(model, prompts, new),
                "dense loop (floor)": run_dense,
            },
            rounds=5 if options.full else 1,
        )
        latencies = report_latency({"fused": engine, "eager": eager}, is_full=options.full)
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    rows: list[tuple[object, ...]] = [
        (name, medians[name], medians[name] / medians["static generate"], len(rates[name]))
        for name in rates
    ]
    if options.shape == "13.8M":
        rows += [(f"{name}, as recorded elsewhere", rate, "", "") for name, rate in MARKS.items()]
    print_table("Output tokens/s", ("way", "tokens/s", "over generate", "runs"), rows)
    checks = [
        at_least(
            "engine over static generate",
            medians["engine"] / medians["static generate"],
            GOAL_OVER_GENERATE,
            "x",
        )
    ]
    conclude(options, {"tokens_per_s": rates, "closed_loop": latencies}, checks)


if __name__ == "__main__":
    main()
