"""A soak test of a real service: load, bursts, cancels, slow readers and faulty requests, while its
processes are stopped and killed; see docs/survival-cases.md, case 48.

Usage: `PYTHONPATH=tests python -m chaos.soak --minutes 5`; `--full`: two hours. Exit code 0: every
limit held, 1: one did not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import psutil

from chaos.soak_load import (
    DEADLY,
    HUNG,
    NUM_CANARIES,
    POISON,
    Kind,
    Load,
    SoakPlan,
    loaded,
)
from chaos.stream_holder import holder
from penstock.client import ModelState, OperationsClient, ServerStats
from support.observation import is_quiet, observed, until_stats
from support.service import Service, simulated, until_gone


class Fault(enum.StrEnum):
    ENGINE_KILL = "engine killed"
    ENGINE_HANG = "engine stopped for good"
    ENGINE_PAUSE = "engine stopped for a second"
    DEADLY_PROMPT = "prompt that kills the engine"
    FRONT_KILL = "front killed"
    FRONT_PAUSE = "front stopped for a second"
    CONNECTIONS_LOST = "connections lost"
    CLIENT_KILL = "client killed"
    CLIENT_STOP = "client stopped, then killed"
    ROLLING_RESTART = "rolling restart"


DEATHS = {Fault.ENGINE_KILL: 1, Fault.ENGINE_HANG: 1, Fault.DEADLY_PROMPT: 2}
"""How often the fault kills the engine: a prompt is known to be deadly only after its
second crash.
"""
MAX_DEATHS, DEATH_WINDOW_S = 4, 65.0
"""Maximum number of engine deaths in a window of this many seconds; after one more, the service
exits, as specified.
"""
PROBATION_S = 15.0
"""Seconds during which the requests of an engine that failed by itself run one by one. If an engine
is killed in this time, its death is attributed to the request that runs.
"""
_OWN_FAULTS = (Fault.DEADLY_PROMPT, Fault.ENGINE_HANG)
_FIRST_FAULT_S = 3.0
_LONG_S = 120.0
_PAUSE_S = 1.0
_STOPPED_CLIENT_S = 4.0
_GONE_S = 30.0
_SETTLE_S = 60.0
_REPORT_EVERY = 10

FORBIDDEN = ("Traceback", "was never retrieved", "Failed to detach", "leak", "Segmentation fault")
"""Texts that no log line may contain, whatever faults are injected."""
MAX_ERROR_RATE = 0.01
MAX_ERROR_RATE_IN_A_MINUTE = 0.10
MAX_RECOVERY_S = 30.0
WARM_UP_S = 60.0
# grpc.aio keeps some memory per cancelled stream, and caches grow until they are full.
MAX_BYTES_PER_CANCEL = 250
MAX_BYTES_ONCE = 24 << 20
FULL = replace(
    SoakPlan(), num_streams=64, num_held=16, burst_size=256, burst_every_s=60.0, fault_every_s=20.0
)


def schedule(plan: SoakPlan) -> Iterator[tuple[float, Fault]]:
    """Yield (seconds from the start, fault) in order; every kind of fault occurs once before any
    occurs again.

    A fault that would exceed the number of engine deaths that the service tolerates is postponed.
    """
    chance = random.Random(plan.seed)
    possible = [
        fault
        for fault in Fault
        if not (fault is Fault.DEADLY_PROMPT and plan.is_torch)
        and not (fault is Fault.ROLLING_RESTART and plan.seconds < _LONG_S)
    ]
    deaths: list[float] = []
    on_probation_until_s = 0.0
    left: list[Fault] = []
    at_s = _FIRST_FAULT_S
    while at_s < plan.seconds - plan.fault_every_s:
        if not left:
            left = list(possible)
            chance.shuffle(left)
        num_recent = sum(time_s > at_s - DEATH_WINDOW_S for time_s in deaths)
        most = 0 if at_s < on_probation_until_s else MAX_DEATHS - num_recent
        fault = next((fault for fault in left if DEATHS.get(fault, 0) <= most), None)
        if fault is not None:
            left.remove(fault)
            deaths += [at_s] * DEATHS.get(fault, 0)
            if fault in _OWN_FAULTS:
                on_probation_until_s = at_s + PROBATION_S
            yield at_s, fault
        at_s += plan.fault_every_s


class Watch:
    """Observes a service once a second. `problems`: descriptions of invalid statistics and of
    forbidden log lines.

    `memory`: samples (monotonic seconds, resident bytes) of every process, by its role and pid.
    """

    def __init__(self, service: Service, operations: OperationsClient) -> None:
        self.problems: list[str] = []
        self.memory: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self.num_looks = 0
        self._service = service
        self._operations = operations
        self._processes = [("supervisor", psutil.Process(service.process.pid))]
        self._num_read = 0

    async def run(self, report: Callable[[], None]) -> None:
        """Observe until cancelled; call `report` periodically."""
        async for stats in self._operations.watch_stats(interval_s=1.0):
            self.problems += problems_of(stats)
            for role, process in self._live():
                with contextlib.suppress(psutil.Error):
                    if size := process.memory_info().rss:  # a zombie has none
                        sample = (time.monotonic(), size)
                        self.memory.setdefault((role, process.pid), []).append(sample)
            self.read_log()
            if self.num_looks % _REPORT_EVERY == 0:
                report()
            self.num_looks += 1

    def alive(self, role: str) -> list[psutil.Process]:
        return [process for known, process in self._live() if known == role]

    def read_log(self) -> None:
        """Search the new log lines for forbidden texts, and discard old ones, to bound memory."""
        lines = self._service.stderr
        for line in lines[self._num_read :]:
            if "flight" not in line and any(text in line for text in FORBIDDEN):
                self.problems.append(f"in the log: {line.strip()[:300]}")
        del lines[:-100]
        self._num_read = len(lines)

    def _live(self) -> list[tuple[str, psutil.Process]]:
        for role, pids in list(self._service.pids.items()):
            while not pids.empty():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._processes.append((role, psutil.Process(pids.get_nowait())))
        # By pid and start time: another process may have the pid of a dead one.
        self._processes = [pair for pair in self._processes if _is_alive(pair[1])]
        return self._processes


def problems_of(stats: ServerStats) -> Iterator[str]:
    for model in stats.models:
        cache = model.cache
        parts = cache.num_used_blocks + cache.num_cached_blocks + cache.num_free_blocks
        if cache.num_total_blocks and parts != cache.num_total_blocks:
            yield f"{parts} blocks of {cache.num_total_blocks}"
        if model.num_processing > model.max_num_seqs > 0:
            yield f"{model.num_processing} requests run on {model.max_num_seqs} slots"
        if not model.num_processing and not model.num_pending and cache.num_used_blocks > 0:
            yield f"no request is live, {cache.num_used_blocks} blocks are used"


def has_engine(stats: ServerStats) -> bool:
    return bool(stats.models) and all(model.state is ModelState.READY for model in stats.models)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected. `recovery_s`: seconds to the first token of a request sent right
    after the fault; None if that request got no token or an error.
    """

    fault: Fault
    at_s: float
    recovery_s: float | None = None
    note: str = ""
    has_struck: asyncio.Event = field(default_factory=asyncio.Event, repr=False)


class Injector:
    """Injects the scheduled faults. `report`: receives a line for each."""

    def __init__(
        self,
        plan: SoakPlan,
        service: Service,
        operations: OperationsClient,
        load: Load,
        watch: Watch,
        report: Callable[[str], None],
    ) -> None:
        self.injected: list[InjectedFault] = []
        self._plan = plan
        self._service = service
        self._operations = operations
        self._load = load
        self._watch = watch
        self._report = report
        self._chance = random.Random(f"{plan.seed}/faults")

    async def run(self) -> None:
        """Inject every fault at its time, or later if earlier ones were late."""
        begun_s = time.monotonic()
        late_s = 0.0
        async with asyncio.TaskGroup() as group:
            for at_s, fault in schedule(self._plan):
                # A late fault delays all later ones, so that they do not occur together.
                late_s = max(late_s, time.monotonic() - begun_s - at_s)
                await asyncio.sleep(max(0.0, begun_s + at_s + late_s - time.monotonic()))
                if self._load.is_over:
                    return
                one = InjectedFault(fault=fault, at_s=time.monotonic() - begun_s)
                self._report(f"{one.at_s:6.1f} s  {fault}")
                self.injected.append(one)
                group.create_task(self._probe(one))
                await self._inject(one)

    async def _probe(self, one: InjectedFault) -> None:
        """Measure the time to the first token of a request that is sent right after the fault."""
        await one.has_struck.wait()
        asked_s = time.monotonic()
        one.note, first_s = await self._load.canary()
        if not one.note and first_s is not None:
            one.recovery_s = first_s - asked_s

    async def _inject(self, one: InjectedFault) -> None:
        match one.fault:
            case Fault.ENGINE_KILL:
                self._signal(one, "engine", signal.SIGKILL)
            case Fault.FRONT_KILL:
                # A front and its engine must not die together, as both know the requests.
                await until_stats(self._operations, has_engine)
                self._signal(one, "front", signal.SIGKILL)
            case Fault.ENGINE_PAUSE | Fault.FRONT_PAUSE:
                await self._pause(one, "engine" if one.fault is Fault.ENGINE_PAUSE else "front")
            case Fault.ENGINE_HANG:
                await self._hang(one)
            case Fault.CONNECTIONS_LOST:
                # Half of the connections, with whatever calls they carry.
                self._load.relays[0].cut()
                one.has_struck.set()
            case Fault.CLIENT_KILL | Fault.CLIENT_STOP:
                async with holder(self._service.address, self._plan.num_held) as client:
                    if one.fault is Fault.CLIENT_STOP and client.returncode is None:
                        client.send_signal(signal.SIGSTOP)
                        one.has_struck.set()
                        await asyncio.sleep(_STOPPED_CLIENT_S)
                one.has_struck.set()
            case Fault.ROLLING_RESTART:
                self._service.signal(signal.SIGUSR2)
                one.has_struck.set()
            case Fault.DEADLY_PROMPT:
                one.has_struck.set()
                await self._load.deadly()

    def _signal(
        self, one: InjectedFault, role: str, number: signal.Signals
    ) -> psutil.Process | None:
        """Send a signal to a random live process of that role; return the process, None if there is
        none.
        """
        one.has_struck.set()
        processes = self._watch.alive(role)
        if not processes:
            return None
        process = self._chance.choice(processes)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return process

    async def _pause(self, one: InjectedFault, role: str) -> None:
        process = self._signal(one, role, signal.SIGSTOP)
        await asyncio.sleep(_PAUSE_S)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    async def _hang(self, one: InjectedFault) -> None:
        """Stop an engine with SIGSTOP and do not resume it: the supervisor must detect and replace
        it.
        """
        process = self._signal(one, "engine", signal.SIGSTOP)
        if process is None:
            return
        try:
            async with asyncio.timeout(_GONE_S):
                await until_gone(process.pid)
        except TimeoutError:
            self._watch.problems.append("a stopped engine was not replaced")
            process.resume()


@dataclass(frozen=True, slots=True)
class SoakResult:
    """The result of a soak. `limits`: (name, value, whether it holds) of each limit that the soak
    must keep. `details`: further lines of the report.
    """

    limits: list[tuple[str, object, bool]]
    details: list[str]

    @property
    def holds(self) -> bool:
        return all(holds for _, _, holds in self.limits)

    def __str__(self) -> str:
        lines = [
            f"{'holds' if holds else 'MISSED'}: {name}: {value}"
            for name, value, holds in self.limits
        ]
        return "\n".join([*lines, *self.details, f"Soak {'passed' if self.holds else 'FAILED'}"])


async def run_soak(plan: SoakPlan, report: Callable[[str], None]) -> SoakResult:
    """Run a plan; return its result. `report` receives progress lines."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))
        service, operations = await stack.enter_async_context(observed(*arguments(plan, folder)))
        watch = Watch(service, operations)
        load = await stack.enter_async_context(loaded(plan, service.address))
        ledger = load.ledger
        injector = Injector(plan, service, operations, load, watch, report)

        def progress() -> None:
            counts = f"{ledger.num_errors()} errors, {len(ledger.wrong)} wrong"
            report(f"{ledger.num.total()} requests, {counts}, {len(watch.problems)} problems")

        async with asyncio.TaskGroup() as background:
            watching = background.create_task(watch.run(progress))
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run())
                group.create_task(injector.run())
            async with asyncio.timeout(_SETTLE_S):
                await until_stats(operations, is_quiet)
            last = [await load.canary() for _ in range(NUM_CANARIES)]
            async with asyncio.timeout(_SETTLE_S):
                await until_stats(operations, is_quiet)
            watching.cancel()
        service.signal(signal.SIGTERM)
        exit_code = await service.ended()
        watch.read_log()
    limits = [
        *_limits_of_requests(load),
        ("canaries that failed at the end", last, not any(cause for cause, _ in last)),
        *_limits_of_faults(injector.injected),
        ("looks at the accounts > 0", watch.num_looks, watch.num_looks > 0),
        ("problems in accounts and log", watch.problems[:100], not watch.problems),
        *_limits_of_memory(watch, load),
        ("exit code of the service", exit_code, exit_code == 0),
    ]
    details = [
        f"{ledger.num_tokens} tokens compared with the reference; {plan}",
        *(f"requests: {kind}: {num}" for kind, num in ledger.num.items()),
        *(f"errors: {kind}: {cause}: {n}" for (kind, cause), n in ledger.errors.items()),
        *map(str, injector.injected),
    ]
    result = SoakResult(limits, details)
    return result if result.holds else SoakResult(limits, [*details, *service.stderr[-100:]])


def arguments(plan: SoakPlan, flight_folder: str) -> list[str]:
    """Return the arguments of `penstock serve`: capacity for the steady load, but not
    for a burst.
    """
    cost = {"step_s": 0.02, "prefill_token_s": 0.0, "decode_slot_s": 0.0}
    faults = [
        {"kind": "request_fails", "at_prompt_token": POISON, "max_times": 10**9},
        {"kind": "process_exits", "at_prompt_token": DEADLY, "at_output": 3, "exit_code": 9},
    ]
    model = (
        ["--executor", "torch", "--dtype", "float32", "--threads", "1"]
        if plan.is_torch
        else simulated(cost=cost, faults=faults)
    )
    return [
        *model,
        *("--fronts", "2", "--flight-folder", flight_folder),
        *("--max-num-seqs", str(plan.num_streams + 2 * plan.num_held + 8)),
        *("--max-num-waiting", str(max(16, plan.burst_size // 2))),
        *("--max-reader-stall-s", "5", "--drain-timeout-s", "10", "--engine-hang-s", "3"),
    ]


def _limits_of_requests(load: Load) -> Iterator[tuple[str, object, bool]]:
    ledger = load.ledger
    yield "wrong tokens or numbers", ledger.wrong[:100], not ledger.wrong
    rate, worst = ledger.num_errors() / max(1, ledger.num.total()), ledger.worst_minute
    yield f"errors < {MAX_ERROR_RATE:.0%}", f"{rate:.2%}", rate < MAX_ERROR_RATE
    name = f"errors in the worst minute < {MAX_ERROR_RATE_IN_A_MINUTE:.0%}"
    yield name, f"{worst:.2%}", worst < MAX_ERROR_RATE_IN_A_MINUTE
    for name, num in (
        ("canaries that failed", ledger.num_errors(Kind.CANARY)),
        ("errors of lost engines", ledger.num_errors(text="ENGINE_DOWN")),
        ("hung requests", ledger.num_errors(text=HUNG)),
    ):
        yield name, num, num == 0


def _limits_of_faults(injected: list[InjectedFault]) -> Iterator[tuple[str, object, bool]]:
    yield "faults > 0", len(injected), bool(injected)
    never = [one for one in injected if one.recovery_s is None]
    yield "faults without recovery", never, not never
    slowest_s = max((one.recovery_s or 0.0 for one in injected), default=0.0)
    name = f"slowest recovery < {MAX_RECOVERY_S:.0f} s"
    yield name, f"{slowest_s:.2f} s", slowest_s < MAX_RECOVERY_S


def _limits_of_memory(watch: Watch, load: Load) -> Iterator[tuple[str, object, bool]]:
    """Yield the limit on memory growth for each process that lived for more than twice WARM_UP_S.
    Growth is counted from WARM_UP_S on, after the first allocations of a process.
    """
    most = MAX_BYTES_ONCE + MAX_BYTES_PER_CANCEL * load.ledger.num[Kind.CANCEL]
    for (role, pid), samples in watch.memory.items():
        begun_s, ended_s = samples[0][0], samples[-1][0]
        if ended_s - begun_s > 2 * WARM_UP_S:
            warm = next(size for at_s, size in samples if at_s - begun_s >= WARM_UP_S)
            growth = samples[-1][1] - warm
            name = f"growth of {role} {pid} after its first minute < {most / 2**20:.0f} MiB"
            yield name, f"{growth / 2**20:+.1f} MiB", growth < most


def main() -> int:
    parser = argparse.ArgumentParser(description="Stop and kill a service under load.")
    parser.add_argument("--minutes", type=float, help="how long (default: 5, with --full 120)")
    parser.add_argument("--full", action="store_true", help="64 streams, bursts of 256")
    parser.add_argument("--torch", action="store_true", help="the demo model, not the simulated")
    parser.add_argument("--seed", type=int, default=1, help="of load and faults (default: 1)")
    options = parser.parse_args()
    minutes = options.minutes or (120.0 if options.full else 5.0)
    if not 0.25 <= minutes <= 24 * 60:
        parser.error(f"--minutes must be 0.25 to 1440, not {minutes:g}")
    plan = replace(
        FULL if options.full else SoakPlan(),
        seconds=minutes * 60,
        seed=options.seed,
        is_torch=options.torch,
    )
    result = asyncio.run(run_soak(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    print(result)
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
