"""Measures the overhead of Penstock over TensorRT-LLM, with a fake of TensorRT-LLM.

The fake is used directly and through Penstock. Runs closed loops with 1, 64 and 256 requests in
flight, 512 random prompt tokens each, steps of 20 ms; the first requests are all sent within the
time of one step. "Burst" is the TTFT of these first requests, "TTFT" the TTFT of all other
requests. Three variants alternate in one run: the floor (the lower bound: a program that uses the
fake directly, one task per request), the engine side (scheduler, executor and engine loop, with a
client of the engine's socket that only records tokens) and the service (`penstock serve`, gRPC
clients). Each has a separate engine.

    python benchmarks/trtllm_overhead.py [--full] [--json FILE]

"Added" is the difference between a variant and the floor of the same round; the median over the
rounds is reported. Engine, front (gRPC server process) and clients are separate processes: with
fewer cores than processes they also wait for each other, unlike the floor, which is a single
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.executor.models import resolve_model
from report import Outcome, RunFailed, arguments, at_most, medians, print_rows, progress, run
from services import cpu_s, process, service
from trtllm_load import ANSWER, Load, LoadSummary

CONCURRENCIES = (1, 64, 256)
MIN_REQUESTS = 3
STEP_MS = 20.0
NUM_PROMPT_TOKENS = 512
GOAL_PERCENT = 5.0
FLOOR, ENGINE, SERVICE = "floor", "engine side", "service"
_HERE = Path(__file__).resolve().parent
_FIGURES = ("burst_mean", "ttft_mean", "ttft_p50", "itl_mean", "itl_p50")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of rounds and the size of each run. A run sends `num_waves` times the concurrency,
    but at least MIN_REQUESTS requests. The first wave is the burst. `output_tokens`: least and
    greatest output length.
    """

    num_rounds: int
    num_waves: int
    output_tokens: tuple[int, int]


_SIZES = {
    False: Size(num_rounds=3, num_waves=2, output_tokens=(32, 64)),
    True: Size(num_rounds=7, num_waves=4, output_tokens=(64, 128)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(LoadSummary):
    """The results of one load on one variant. `engine_us`, `front_us`: CPU time of the variant's
    engine and front processes per token; 0 for the floor, because its client process runs the
    engine.
    """

    side: str
    in_flight: int
    engine_us: float = 0.0
    front_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared variants: its client process, and the process ids of its servers."""

    name: str
    sender: subprocess.Popen[str]
    servers: dict[str, list[int]]

    def run(self, load: Load) -> Run:
        """Send one load to the client process; wait for the results and return them."""
        assert self.sender.stdin is not None
        before = {name: sum(map(cpu_s, pids)) for name, pids in self.servers.items()}
        print(json.dumps(asdict(load)), file=self.sender.stdin, flush=True)
        seen = LoadSummary(**json.loads(answer_of(self.sender)))
        spent = {
            name: (sum(map(cpu_s, pids)) - before[name]) * 1e6 / seen.num_tokens
            for name, pids in self.servers.items()
        }
        return Run(
            side=self.name,
            in_flight=load.concurrency,
            engine_us=spent.get("engine", 0.0),
            front_us=spent.get("front", 0.0),
            **asdict(seen),
        )


def answer_of(process: subprocess.Popen[str]) -> str:
    """Return the next line of results from a benchmark process; raise RunFailed if it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            return line.removeprefix(ANSWER)
    raise RunFailed(f"{process.args!r} ended: exit code {process.wait()}")


@contextlib.contextmanager
def all_sides(folder: Path) -> Generator[list[Side]]:
    """Start all variants; yield them ready and idle."""
    path, model = str(folder / "engine.sock"), str(folder / "model")
    control = json.dumps({"step_s": STEP_MS / 1e3, "num_blocks": 16_384})
    fakes = str(_HERE.parent / "tests" / "fakes")
    paths = os.pathsep.join(filter(None, (fakes, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "TLLM_FAKE_CONTROL": control}
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = (sys.executable, str(_HERE / "trtllm_sides.py"), *arguments)
            started = stack.enter_context(process(*command, environment=environment))
            answer_of(started)
            return started

        direct, engine, link = (
            start("floor", model),
            start("engine", model, path),
            start("link", path),
        )
        options = ("--executor", "trtllm", "--model", model, "--log-level", "warning")
        serving = stack.enter_context(service(*options, num_fronts=None, environment=environment))
        clients = start("service", serving.address)
        yield [
            Side(FLOOR, direct, {}),
            Side(ENGINE, link, {"engine": [engine.pid]}),
            Side(SERVICE, clients, {role: serving.pids(role) for role in ("engine", "front")}),
        ]


def write_model(folder: Path) -> int:
    """Write the demo model's tokenizer, and a configuration that allows long prompts; no weights.
    Return the size of the vocabulary.
    """
    demo = resolve_model("demo")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder)
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return int(config["vocab_size"])


def all_runs(size: Size) -> list[Run]:
    """Run all rounds; each round begins with a different variant. Returns the results of all
    runs.
    """
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        vocab_size = write_model(Path(name) / "model")
        with all_sides(Path(name)) as sides:
            for number in range(-1, size.num_rounds):
                least, most = size.output_tokens if number >= 0 else (4, 4)  # -1 is warm-up
                for in_flight in CONCURRENCIES:
                    load = Load(
                        concurrency=in_flight,
                        num_requests=max(MIN_REQUESTS, in_flight * size.num_waves),
                        num_prompt_tokens=NUM_PROMPT_TOKENS,
                        min_output_tokens=least,
                        max_output_tokens=most,
                        step_s=STEP_MS / 1e3,
                        vocab_size=vocab_size,
                        seed=1000 * (number + 1) + in_flight,
                    )
                    first = max(0, number) % len(sides)
                    found = [side.run(load) for side in sides[first:] + sides[:first]]
                    progress(f"round {number + 1} of {size.num_rounds}, {in_flight} in flight")
                    runs += found if number >= 0 else []
    return runs


def added(runs: list[Run], side: str, in_flight: int, figure: str) -> tuple[float, float]:
    """Return the difference of `figure` from the floor, in milliseconds and in percent. Both are
    medians over the rounds.
    """
    mine, floor = (
        [getattr(one, figure) for one in runs if (one.side, one.in_flight) == (each, in_flight)]
        for each in (side, FLOOR)
    )
    pairs = list(zip(mine, floor, strict=True))
    return (
        statistics.median(one - base for one, base in pairs),
        statistics.median((one / base - 1.0) * 100 for one, base in pairs),
    )


def measure(options: Namespace) -> Outcome:
    """Run all variants; print the medians and what they add to the floor."""
    size = _SIZES[options.full]
    before = os.getloadavg()[0]
    runs = all_runs(size)
    print(f"\n{len(os.sched_getaffinity(0))} cores, load average {before:.1f} before")
    title = f"Closed loop, steps of {STEP_MS:g} ms: milliseconds; CPU microseconds per token"
    columns = ("in_flight", "side", *LoadSummary.__dataclass_fields__, "engine_us", "front_us")
    print_rows(title, medians(runs, "in_flight", "side"), *columns)
    rows = [
        {"in flight": in_flight, "side": side}
        | {
            figure: "{:+.2f} ms {:+.1f} %".format(*added(runs, side, in_flight, figure))
            for figure in _FIGURES
        }
        for in_flight in CONCURRENCIES
        for side in (ENGINE, SERVICE)
    ]
    print_rows("Added to the floor", rows)
    most = max(CONCURRENCIES)
    return {"size": size, "runs": runs}, [
        at_most(
            f"{side}: added {figure.replace('_', ' ')}, {most} in flight",
            added(runs, side, most, figure)[1],
            *(GOAL_PERCENT, "%"),
        )
        for side in (ENGINE, SERVICE)
        for figure in _FIGURES
    ]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
