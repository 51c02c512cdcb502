"""The overhead of Penstock over TensorRT-LLM, measured with a fake of TensorRT-LLM.

The fake (the "stand-in") is used directly and through Penstock. Runs closed loops with 1, 64 and
256 requests in flight, 512 random prompt tokens each, steps of 20 ms; the first requests are all
sent within the time of one step. "Burst" is the TTFT of these first requests, "TTFT" that of the
others. Three variants alternate in one run: the floor (a program that uses the stand-in directly,
one task per request), the engine side (scheduler, executor and engine loop, with a client of the
engine's socket that only counts) and the service (`penstock serve`, gRPC clients). Each has a
separate engine.

    python benchmarks/trtllm_overhead.py [--full] [--json FILE]

"Added" is the difference between a variant and the floor of the same round; the median over the
rounds is reported. Engine, front-end process and clients are separate processes: with fewer cores
than processes they also wait for each other, unlike the floor, which is a single process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.executor.models import resolve_model
from report import Check, arguments, at_most, print_checks, print_table, progress, write_json
from services import cpu_s, service
from trtllm_load import ANSWER, Load, Seen

CONCURRENCIES = (1, 64, 256)
MIN_REQUESTS = 3
GOAL_PERCENT = 5.0
FLOOR, ENGINE, SERVICE = "floor", "engine side", "service"
PATIENCE_S = 120.0
_HERE = Path(__file__).resolve().parent
_METRICS = ("burst_mean", "ttft_mean", "ttft_p50", "itl_mean", "itl_p50", "request_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work: `num_waves` times the concurrency in each run, at least MIN_REQUESTS."""

    num_rounds: int
    num_waves: int
    num_prompt_tokens: int
    min_output_tokens: int
    max_output_tokens: int
    step_ms: float
    concurrencies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of one load on one variant. `cpu_us`: CPU time of each of its processes, per
    token.
    """

    side: str
    concurrency: int
    round: int
    seen: Seen
    cpu_us: dict[str, float]


class Side:
    """One of the compared variants: its client process, and the process ids of its servers by name.

    The floor has no servers: its client runs the engine.
    """

    def __init__(
        self, name: str, sender: asyncio.subprocess.Process, servers: dict[str, list[int]]
    ) -> None:
        self.name = name
        self._sender = sender
        self._servers = servers

    async def run(self, load: Load, number: int) -> Run:
        """Send one load and wait for its results."""
        assert self._sender.stdin is not None
        before = {name: sum(map(cpu_s, pids)) for name, pids in self._servers.items()}
        self._sender.stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        seen = Seen(**json.loads(await answer_of(self._sender)))
        cpu_us = {
            name: (sum(map(cpu_s, pids)) - before[name]) * 1e6 / seen.num_tokens
            for name, pids in self._servers.items()
        }
        sender = "engine" if self.name == FLOOR else "client"
        cpu_us[sender] = seen.cpu_us
        return Run(
            side=self.name, concurrency=load.concurrency, round=number, seen=seen, cpu_us=cpu_us
        )


async def answer_of(process: asyncio.subprocess.Process) -> str:
    """Return the next line of results from a benchmark process."""
    assert process.stdout is not None
    while line := (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode():
        if line.startswith(ANSWER):
            return line.removeprefix(ANSWER)
    raise SystemExit(f"a process of the benchmark ended: exit code {await process.wait()}")


def environment(step_ms: float) -> dict[str, str]:
    """Return the environment of a process that imports the stand-in."""
    fakes = _HERE.parent / "tests" / "fakes"
    control = {"step_s": step_ms / 1e3, "num_blocks": 16_384}
    path = os.pathsep.join(filter(None, (str(fakes), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "TLLM_FAKE_CONTROL": json.dumps(control)}


@contextlib.asynccontextmanager
async def process(*command: str, step_ms: float) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Start a Python process that imports the stand-in; terminate it at the end."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(step_ms),
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            await started.communicate()


@contextlib.asynccontextmanager
async def all_sides(folder: Path, step_ms: float) -> AsyncGenerator[list[Side]]:
    """Start all variants; yield them ready and idle."""
    roles = str(_HERE / "trtllm_sides.py")
    path, model = str(folder / "engine.sock"), str(folder / "model")
    async with contextlib.AsyncExitStack() as stack:

        async def start(*command: str) -> asyncio.subprocess.Process:
            return await stack.enter_async_context(process(*command, step_ms=step_ms))

        direct = await start(roles, "floor", model)
        await answer_of(direct)
        engine = await start(roles, "engine", model, path)
        await answer_of(engine)
        link = await start(roles, "link", path)
        await answer_of(link)
        serving = stack.enter_context(
            service(
                *("--executor", "trtllm", "--model", model, "--log-level", "warning"),
                num_fronts=None,
                environment=environment(step_ms),
            )
        )
        clients = await start(roles, "service", serving.address)
        await answer_of(clients)
        yield [
            Side(FLOOR, direct, {}),
            Side(ENGINE, link, {"engine": [engine.pid]}),
            Side(SERVICE, clients, {role: serving.pids(role) for role in ("engine", "front")}),
        ]


def write_model(folder: Path) -> None:
    """Write the demo model's tokenizer, and a configuration that allows long prompts; no
    weights.
    """
    demo = resolve_model("demo")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder)
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


async def measure(size: Size) -> list[Run]:
    """Run all rounds; each round begins with a different variant."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        write_model(folder / "model")
        vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        async with all_sides(folder, size.step_ms) as sides:
            for number in range(-1, size.num_rounds):
                is_warm_up = number < 0
                for concurrency in size.concurrencies:
                    load = Load(
                        concurrency=concurrency,
                        num_requests=max(MIN_REQUESTS, concurrency * size.num_waves),
                        num_prompt_tokens=size.num_prompt_tokens,
                        min_output_tokens=4 if is_warm_up else size.min_output_tokens,
                        max_output_tokens=4 if is_warm_up else size.max_output_tokens,
                        step_s=size.step_ms / 1e3,
                        vocab_size=vocab_size,
                        seed=1000 * (number + 1) + concurrency,
                    )
                    first = max(0, number) % len(sides)
                    for side in sides[first:] + sides[:first]:
                        run = await side.run(load, number)
                        if not is_warm_up:
                            runs.append(run)
                            _show_progress(run, size.num_rounds)
    return runs


def _show_progress(run: Run, num_rounds: int) -> None:
    load_average = os.getloadavg()[0]
    progress(
        f"round {run.round + 1}/{num_rounds}  {run.concurrency:>3} in flight  {run.side:<11}"
        f"  {run.seen.tokens_per_s:>7,.0f} tokens/s  TTFT {run.seen.ttft_p50:.1f} ms"
        f"  ITL {run.seen.itl_mean:.2f} ms  load {load_average:.1f}"
    )


def of_side(runs: list[Run], side: str, concurrency: int) -> list[Run]:
    return [run for run in runs if run.side == side and run.concurrency == concurrency]


def added(runs: list[Run], side: str, concurrency: int, metric: str) -> tuple[float, float]:
    """Return the difference from the floor in milliseconds and percent, medians over the rounds."""
    pairs = [
        (getattr(run.seen, metric), getattr(floor.seen, metric))
        for run, floor in zip(
            of_side(runs, side, concurrency), of_side(runs, FLOOR, concurrency), strict=True
        )
    ]
    return (
        statistics.median(mine - floor for mine, floor in pairs),
        statistics.median((mine / floor - 1.0) * 100 for mine, floor in pairs),
    )


def report(runs: list[Run], size: Size) -> list[Check]:
    """Print the tables; return the checks."""
    sides = (FLOOR, ENGINE, SERVICE)
    names = (
        *("burst_p50", "burst_p99", "ttft_p50", "ttft_p95", "ttft_p99"),
        *("itl_mean", "itl_p50", "itl_p95", "itl_p99"),
    )
    rows: list[list[object]] = []
    cpu_rows: list[list[object]] = []
    added_rows: list[list[object]] = []
    for concurrency in size.concurrencies:
        for side in sides:
            same = of_side(runs, side, concurrency)
            medians = [
                statistics.median(getattr(run.seen, name) for run in same)
                for name in (*names, "tokens_per_s")
            ]
            rows.append([concurrency, side, *medians])
            cpu_us = {
                part: statistics.median(run.cpu_us[part] for run in same) for part in same[0].cpu_us
            }
            parts = (cpu_us.get(part, 0.0) for part in ("engine", "front", "client"))
            cpu_rows.append([concurrency, side, *parts])
            if side != FLOOR:
                told = (added(runs, side, concurrency, metric) for metric in _METRICS)
                cells = [f"{ms:+.2f} ms {percent:+.1f} %" for ms, percent in told]
                added_rows.append([concurrency, side, *cells])
    title = f"Closed loop, steps of {size.step_ms:g} ms, milliseconds"
    print_table(title, ("in flight", "side", *names, "tokens/s"), rows)
    print_table("Added to the floor", ("in flight", "side", *_METRICS), added_rows)
    print_table(
        "CPU microseconds per token (the floor's engine drives itself)",
        ("in flight", "side", "engine", "fronts", "client"),
        cpu_rows,
    )
    most = max(size.concurrencies)
    return [
        at_most(
            f"{side}: added {metric.replace('_', ' ')}, {most} in flight",
            added(runs, side, most, metric)[1],
            GOAL_PERCENT,
            "%",
        )
        for side in sides[1:]
        for metric in ("burst_mean", "ttft_p50", "ttft_mean", "itl_p50", "itl_mean")
    ]


def size_of(options: argparse.Namespace) -> Size:
    """Return the size of the full or the quick run, with the values that the arguments override."""
    least, most = options.output_tokens or ((64, 128) if options.full else (32, 64))
    return Size(
        num_rounds=options.rounds or (7 if options.full else 3),
        num_waves=options.waves or (4 if options.full else 2),
        num_prompt_tokens=options.prompt_tokens,
        min_output_tokens=least,
        max_output_tokens=most,
        step_ms=options.step_ms,
        concurrencies=tuple(options.in_flight),
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds (default: 3, full 7)")
    parser.add_argument("--waves", type=int, metavar="N", help="requests / in flight (2, full 4)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", default=512)
    parser.add_argument(
        "--output-tokens",
        type=int,
        metavar=("LEAST", "MOST"),
        nargs=2,
        help="shortest and longest output (32 64, full 64 128)",
    )
    parser.add_argument("--step-ms", type=float, metavar="MS", default=20.0)
    parser.add_argument("--in-flight", type=int, metavar="N", nargs="+", default=CONCURRENCIES)
    options = parser.parse_args()
    size = size_of(options)
    if size.num_waves < 2:
        parser.error("--waves must be at least 2: the first is the burst")
    before = os.getloadavg()
    runs = asyncio.run(measure(size))
    checks = report(runs, size)
    print_checks(checks)
    num_cores = len(os.sched_getaffinity(0))
    after = os.getloadavg()
    print(f"\n{num_cores} cores, load average {before[0]:.1f} before, {after[0]:.1f} after")
    results = {
        "size": asdict(size),
        "num_cores": num_cores,
        "load_average": {"before": before, "after": after},
        "runs": [asdict(run) for run in runs],
    }
    write_json(options.json, results, checks)


if __name__ == "__main__":
    main()
