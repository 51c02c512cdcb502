"""The service on the CPU under 1, 8, 32 and 128 streams, beside its own engine without a service.

A Llama of random weights; streams that all start at once, prompts of 288 random tokens and 128 new
ones. The engine alone, in this process, runs as many such requests at a time with the same threads;
"over offline" is the ratio of tokens per second. The clients are processes on the same machine:
give the engine fewer threads than there are cores.

    python benchmarks/cpu_served.py [--shape 13.8M|91M] [--threads N] [--fronts N] [--int8]
        [--full] [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine_cpu import SHAPES, VOCAB_SIZE, EngineRun, build_model
from usage import needing

with needing("torch"):
    import torch

    from penstock.executor.torch.create import create_torch_executor

from penstock.executor.config import ExecutorConfig
from report import arguments, at_least, conclude, print_table
from served_model import Load, Wave, served
from services import service
from word_tokenizer import write_tokenizer

LOAD = Load(num_prompt=288, num_new=128, vocab_size=VOCAB_SIZE)
STREAMS = (1, 8, 32, 128)
BUDGET = 2048
MAX_LENGTH = 768
GOAL_OVER_OFFLINE = 0.9
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}


def offline(folder: Path, settings: dict[str, Any], rounds: int) -> dict[int, float]:
    """Tokens per second of the engine alone, by requests at a time; medians."""
    config = ExecutorConfig(
        model_path=folder, max_num_seqs=STREAMS[-1], max_seq_len=MAX_LENGTH, **settings
    )
    run = EngineRun(create_torch_executor(config), BUDGET)
    random = np.random.default_rng(0)
    found: dict[int, float] = {}
    for count in STREAMS:
        rates: list[float] = []
        for _ in range(rounds + 1):
            prompts = random.integers(3, VOCAB_SIZE, (count, LOAD.num_prompt)).tolist()
            latency = run(prompts, LOAD.num_new, count)
            rates.append(latency.num_tokens / latency.elapsed)
        # The first one warms up.
        found[count] = statistics.median(rates[1:])
        print(f"offline, {count} at a time: {found[count]:,.0f} tokens/s", flush=True)
    return found


async def through_streams(
    folder: Path, settings: dict[str, Any], threads: int, num_fronts: int, rounds: int
) -> dict[int, Wave]:
    """By streams, the wave of median speed."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with service(
        *("--model", str(folder), "--device", "cpu", "--threads", str(threads)),
        *("--prefix-caching", "off", "--max-seq-len", str(MAX_LENGTH)),
        *("--max-num-seqs", str(STREAMS[-1]), "--max-num-batched-tokens", str(BUDGET)),
        *flags,
        num_fronts=num_fronts,
    ) as serving:
        found: dict[int, Wave] = {}
        for count in STREAMS:
            waves, _ = await served(serving, LOAD, count, num_waves=rounds)
            waves.sort(key=lambda wave: wave.tokens_per_s)
            found[count] = waves[len(waves) // 2]
            print(f"served, {count} streams: {found[count].tokens_per_s:,.0f} tokens/s", flush=True)
    return found


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="13.8M", help="parameters")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parser.add_argument("--fronts", type=int, default=1, help="front processes")
    parser.add_argument("--int8", action="store_true", help="weights, keys and values in 8 bits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings: dict[str, Any] = dict(INT8) if options.int8 else {}
    rounds = 5 if options.full else 3
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as made:
        folder = Path(made)
        build_model(folder, options.shape)
        write_tokenizer(folder, VOCAB_SIZE)
        alone = offline(folder, settings, rounds)
        waves = asyncio.run(
            through_streams(folder, settings, options.threads, options.fronts, rounds)
        )
    rows = [
        (
            *(count, alone[count], wave.tokens_per_s, wave.tokens_per_s / alone[count]),
            *(wave.ttft_p50_ms, wave.itl_p50_ms, wave.itl_p99_ms),
        )
        for count, wave in waves.items()
    ]
    columns = ("streams", "offline", "served", "ratio", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms")
    print_table("Tokens per second", columns, rows)
    checks = [
        at_least(
            f"served over offline, {count} streams",
            waves[count].tokens_per_s / alone[count],
            GOAL_OVER_OFFLINE,
            "x",
        )
        for count in (32, 128)
    ]
    conclude(options, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]}, checks)


if __name__ == "__main__":
    main()
