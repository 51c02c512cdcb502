"""One soak from start to report: a real service, its faults, checks once a second, and gates."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from penstock.client import ModelState, OperationsClient, PenstockError, ServerStats
from support.observation import observed
from support.service import Service, simulated
from support.soak_load import (
    DEADLY,
    NUM_CANARIES,
    POISON,
    Lines,
    Load,
    Reference,
    SimulatedReference,
    loaded,
    measured,
)
from support.soak_plan import HUNG, Kind, Ledger, SoakPlan, Strike, schedule

# What a soak looks at once a second: the account of blocks, memory, the log.

HARD_ZERO = ("Traceback", "was never retrieved", "Failed to detach", "leak", "Segmentation fault")
"""Texts that no log line may contain, whatever faults are injected."""
_ALLOWED = ("flight",)
MAX_LOG_LINES = 2000


@dataclass(slots=True)
class Memory:
    """Resident bytes of one process, one sample a second; times are monotonic."""

    role: str
    pid: int
    times_s: list[float] = field(default_factory=list[float])
    samples_bytes: list[int] = field(default_factory=list[int])

    @property
    def seconds(self) -> float:
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0

    def growth_bytes(self, warm_up_s: float) -> int:
        """Return the growth from the end of its first `warm_up_s` to its last sample; 0 if it lived
        no longer.
        """
        for time_s, sample in zip(self.times_s, self.samples_bytes, strict=True):
            if time_s - self.times_s[0] >= warm_up_s:
                return self.samples_bytes[-1] - sample
        return 0


class Watch:
    """Observes a service until stopped. `faults`: errors seen."""

    def __init__(self, service: Service, operations: OperationsClient) -> None:
        self.service = service
        self.faults: list[str] = []
        self.memory: dict[int, Memory] = {}
        self._processes = [("supervisor", psutil.Process(service.process.pid))]
        self.num_looks = 0
        self.num_unanswered = 0
        self.most_used_blocks = 0
        self.last: ServerStats | None = None
        self._operations = operations

    def alive(self, role: str) -> list[psutil.Process]:
        """Return the live processes of a role, oldest first."""
        self._hear_of_processes()
        return [process for known, process in self._processes if known == role]

    async def run(self) -> None:
        """Observe once a second, forever."""
        while True:
            self._hear_of_processes()
            await self.look()
            self._weigh()
            self.read_log()
            await asyncio.sleep(1.0)

    async def look(self) -> ServerStats | None:
        """Return the current statistics, None if no server answers; check their sums."""
        try:
            async with asyncio.timeout(5.0):
                stats = await self._operations.get_stats()
        except (PenstockError, grpc.aio.AioRpcError, TimeoutError):
            self.num_unanswered += 1
            return None
        self.num_looks += 1
        self.last = stats
        self.faults += faults_of(stats)
        for model in stats.models:
            self.most_used_blocks = max(self.most_used_blocks, model.cache.num_used_blocks)
        return stats

    async def until(self, is_so: Callable[[ServerStats], bool], seconds: float) -> bool:
        """Observe until the condition holds; return False after the time limit."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            stats = await self.look()
            if stats is not None and is_so(stats):
                return True
            await asyncio.sleep(0.2)
        return False

    def read_log(self) -> None:
        """Search the new lines and drop the oldest: a soak is longer than a test."""
        lines = self.service.stderr
        for line in lines[self._num_read :]:
            is_allowed = any(word in line for word in _ALLOWED)
            if not is_allowed and any(word in line for word in HARD_ZERO):
                self.faults.append(f"in the log: {line.strip()[:300]}")
        self._num_read = len(lines)
        if len(lines) > MAX_LOG_LINES:
            del lines[:-100]
            self._num_read = len(lines)

    _num_read = 0

    def _hear_of_processes(self) -> None:
        for role, pids in list(self.service.pids.items()):
            while not pids.empty():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._processes.append((role, psutil.Process(pids.get_nowait())))
        # By identity, not by number: the number of a dead one may be a unauthenticated caller's by
        # now.
        self._processes = [pair for pair in self._processes if _is_there(pair[1])]

    def _weigh(self) -> None:
        for role, process in self._processes:
            try:
                size = process.memory_info().rss
            except psutil.Error:
                continue
            if size:  # a zombie has none
                memory = self.memory.setdefault(process.pid, Memory(role, process.pid))
                memory.times_s.append(time.monotonic())
                memory.samples_bytes.append(size)


def faults_of(stats: ServerStats) -> Iterator[str]:
    for model in stats.models:
        cache = model.cache
        parts = cache.num_used_blocks + cache.num_cached_blocks + cache.num_free_blocks
        if cache.num_total_blocks and parts != cache.num_total_blocks:
            yield f"{parts} blocks of {cache.num_total_blocks}"
        if model.num_processing > model.max_num_seqs > 0:
            yield f"{model.num_processing} run on {model.max_num_seqs} slots"
        if not model.num_processing and not model.num_pending and cache.num_used_blocks > 0:
            yield f"nobody runs, {cache.num_used_blocks} blocks are used"


def has_engine(stats: ServerStats) -> bool:
    return bool(stats.models) and all(model.state is ModelState.READY for model in stats.models)


def is_quiet(stats: ServerStats) -> bool:
    """Return whether nothing is live, used or streaming."""
    return not any(
        model.num_processing or model.num_pending or model.cache.num_used_blocks
        for model in stats.models
    ) and not any(front.num_live_requests for front in stats.fronts)


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# What a soak does to its service's processes, and how long clients waited for it.

PAUSE_S = 1.0
_STOPPED_CLIENT_S = 4.0
_GONE_S = 30.0
_ROLES = {
    Strike.ENGINE_HANG: "engine",
    Strike.ENGINE_PAUSE: "engine",
    Strike.FRONT_PAUSE: "front",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault: `at_s` from the start, and the recovery time of a canary sent right after it."""

    strike: Strike
    at_s: float
    recovery_s: float | None
    note: str = ""


class Striker:
    """Injects the scheduled faults. `tell`: receives a line for each fault."""

    def __init__(
        self,
        plan: SoakPlan,
        service: Service,
        load: Load,
        watch: Watch,
        tell: Callable[[str], None],
    ) -> None:
        self.struck: list[Struck] = []
        self._plan = plan
        self._service = service
        self._load = load
        self._watch = watch
        self._tell = tell
        self._chance = random.Random(f"{plan.seed}/strikes")

    async def run(self) -> None:
        """Inject every fault at its time, or later by the delay of earlier ones."""
        begun_s = time.monotonic()
        late_s = 0.0
        async with asyncio.TaskGroup() as group:
            for at_s, strike in schedule(self._plan):
                # Who is late makes all others late: they are not to come on top of each other.
                late_s = max(late_s, time.monotonic() - begun_s - at_s)
                await asyncio.sleep(max(0.0, begun_s + at_s + late_s - time.monotonic()))
                if self._load.is_over:
                    return
                self._tell(f"{time.monotonic() - begun_s:6.1f} s  {strike}")
                group.create_task(self._probe(strike, time.monotonic() - begun_s))
                await self._strike(strike)

    async def _probe(self, strike: Strike, at_s: float) -> None:
        """Measure how long a request that is sent now waits for its first token."""
        await asyncio.sleep(0.05)  # the blow lands first
        asked_s = time.monotonic()
        outcome = await self._load.canary()
        first_s = outcome.first_token_s
        recovery_s = None if outcome.cause or first_s is None else first_s - asked_s
        self.struck.append(
            Struck(strike=strike, at_s=at_s, recovery_s=recovery_s, note=outcome.cause)
        )

    async def _strike(self, strike: Strike) -> None:
        match strike:
            case Strike.ENGINE_KILL:
                self._signal("engine", signal.SIGKILL)
            case Strike.FRONT_KILL:
                # What a front and its engine know of a request is in these two: not both at once.
                await self._watch.until(has_engine, _GONE_S)
                self._signal("front", signal.SIGKILL)
            case Strike.ENGINE_PAUSE | Strike.FRONT_PAUSE:
                await self._pause(_ROLES[strike])
            case Strike.ENGINE_HANG:
                await self._hang(_ROLES[strike])
            case Strike.CONNECTIONS_LOST:
                await self._load.lines.lose_half()
            case Strike.CLIENT_KILL:
                client = await self._load.hold(self._service.address)
                client.send_signal(signal.SIGKILL)
            case Strike.CLIENT_STOP:
                client = await self._load.hold(self._service.address)
                client.send_signal(signal.SIGSTOP)
                await asyncio.sleep(_STOPPED_CLIENT_S)
                client.send_signal(signal.SIGKILL)
            case Strike.ROLLING_RESTART:
                self._service.signal(signal.SIGUSR2)
            case Strike.DEADLY_PROMPT:
                await self._load.deadly()

    def _signal(self, role: str, number: signal.Signals) -> psutil.Process | None:
        """Signal one process of that role, if there is one."""
        processes = self._watch.alive(role)
        if not processes:
            return None
        process = self._chance.choice(processes)
        _send(process, number)
        return process

    async def _pause(self, role: str) -> None:
        process = self._signal(role, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        if process is not None:
            _send(process, signal.SIGCONT)

    async def _hang(self, role: str) -> None:
        """Stop a process and leave it stopped: the supervisor must detect it."""
        process = self._signal(role, signal.SIGSTOP)
        until_s = time.monotonic() + _GONE_S
        while process is not None and process in self._watch.alive(role):
            if time.monotonic() > until_s:
                self._watch.faults.append(f"a stopped {role} was not replaced")
                _send(process, signal.SIGCONT)
                return
            await asyncio.sleep(0.1)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Signal that process, never another that reused its pid."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


# The judgement of a soak: gates, and the report as text.

MAX_ERROR_RATE = 0.01
MAX_ERROR_RATE_IN_A_MINUTE = 0.10
MAX_RECOVERY_S = 30.0
WARM_UP_S = 60.0
# What grpc.aio keeps of every cancelled stream, and room for caches that fill once.
MAX_BYTES_PER_CANCEL = 250
MAX_BYTES_ONCE = 24 << 20
_ENGINE_GONE = "ENGINE_DOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A condition that must hold."""

    name: str
    value: str
    goal: str
    holds: bool


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """Everything observed. `last_canaries`: how many were correct on the idle service at the end.

    `log`: the service's last lines, which the report contains if a gate did not hold.
    """

    plan: SoakPlan
    seconds: float
    ledger: Ledger
    watch: Watch
    struck: list[Struck]
    last_canaries: int
    num_last_canaries: int
    is_quiet: bool
    exit_code: int
    log: list[str]
    gates: list[Gate] = field(default_factory=list[Gate])

    @property
    def holds(self) -> bool:
        return all(gate.holds for gate in self.gates)


def judge(result: SoakResult) -> None:
    ledger, watch = result.ledger, result.watch
    result.gates = [
        *_gates_of_requests(result),
        *_gates_of_strikes(result),
        _gate("blocks back to none, nobody lives", result.is_quiet, "yes", result.is_quiet),
        _gate("looks at the account", watch.num_looks, "> 0", watch.num_looks > 0),
        _gate("faults seen in account and log", len(watch.faults), "0", not watch.faults),
        *_gates_of_memory(watch, ledger),
        _gate("exit code of the service", result.exit_code, "0", result.exit_code == 0),
    ]


def _gates_of_requests(result: SoakResult) -> list[Gate]:
    ledger = result.ledger
    num_canaries = ledger.num[Kind.CANARY]
    num_served = num_canaries - ledger.num_failed(Kind.CANARY)
    num_hung = ledger.num_caused_by(HUNG)
    num_gone = ledger.num_caused_by(_ENGINE_GONE)
    worst = ledger.worst_minute
    last, num_last = result.last_canaries, result.num_last_canaries
    return [
        _gate("wrong tokens or numbers", len(ledger.wrong), "0", not ledger.wrong),
        _gate("canaries served", f"{num_served}/{num_canaries}", "all", num_served == num_canaries),
        _gate("canaries at the end", f"{last}/{num_last}", "all", last == num_last),
        _gate(
            "errors",
            f"{ledger.error_rate:.2%}",
            f"< {MAX_ERROR_RATE:.0%}",
            ledger.error_rate < MAX_ERROR_RATE,
        ),
        _gate(
            "errors in the worst minute",
            f"{worst:.2%}",
            f"< {MAX_ERROR_RATE_IN_A_MINUTE:.0%}",
            worst < MAX_ERROR_RATE_IN_A_MINUTE,
        ),
        _gate("errors of lost engines", num_gone, "0", num_gone == 0),
        _gate("hung requests", num_hung, "0", num_hung == 0),
    ]


def _gates_of_strikes(result: SoakResult) -> list[Gate]:
    struck = result.struck
    never = [one for one in struck if one.recovery_s is None]
    slowest = max((one.recovery_s or 0.0 for one in struck), default=0.0)
    return [
        _gate("strikes", len(struck), "> 0", bool(struck)),
        _gate("strikes without recovery", len(never), "0", not never),
        _gate(
            "slowest recovery",
            f"{slowest:.2f} s",
            f"< {MAX_RECOVERY_S:.0f} s",
            slowest < MAX_RECOVERY_S,
        ),
    ]


def _gates_of_memory(watch: Watch, ledger: Ledger) -> list[Gate]:
    """Return gates for processes that lived long enough to separate growth from first
    allocations.
    """
    most = MAX_BYTES_ONCE + MAX_BYTES_PER_CANCEL * ledger.num[Kind.CANCEL]
    return [
        _gate(
            f"memory of {memory.role} {memory.pid} after its first minute",
            f"{memory.growth_bytes(WARM_UP_S) / 2**20:+.1f} MiB",
            f"< {most / 2**20:.0f} MiB",
            memory.growth_bytes(WARM_UP_S) < most,
        )
        for memory in _old(watch)
    ]


def _old(watch: Watch) -> list[Memory]:
    return [memory for memory in watch.memory.values() if memory.seconds > 2 * WARM_UP_S]


def _gate(name: str, value: object, goal: str, holds: bool) -> Gate:
    return Gate(name=name, value=str(value), goal=goal, holds=holds)


def as_text(result: SoakResult) -> str:
    """Return the gates, the requests, the faults and, on a failure, the observations."""
    ledger, watch = result.ledger, result.watch
    lines = [
        f"Soak {'passed' if result.holds else 'FAILED'}: {result.seconds:.0f} s of {result.plan};"
        f" {ledger.num_tokens} tokens checked, {ledger.num_resumed} requests resumed,"
        f" {ledger.num_shed} shed, {ledger.num_refusals} refusals",
        *(
            f"{'holds' if gate.holds else 'MISSED'}: {gate.name}: {gate.value}, goal {gate.goal}"
            for gate in result.gates
        ),
        *(f"requests: {kind}: {ledger.num[kind]}" for kind in Kind),
        *(f"errors: {kind}: {cause}: {num}" for (kind, cause), num in ledger.causes.items()),
        *(f"{one.at_s:.1f} s: {one.strike}: {_recovery(one)}" for one in result.struck),
        *ledger.wrong[:100],
        *watch.faults[:100],
        *([] if result.holds else result.log),
    ]
    return "\n".join(lines)


def _recovery(struck: Struck) -> str:
    if struck.recovery_s is None:
        return f"no canary was served again: {struck.note}"
    return f"a canary was served after {struck.recovery_s:.2f} s"


# One soak from start to report: a real service, its clients, its faults.

NUM_LINES = 8
_STEP_S = 0.02
_FAULTS = [
    {"kind": "request_fails", "at_prompt_token": POISON, "max_times": 10**9},
    {"kind": "process_exits", "at_prompt_token": DEADLY, "at_output": 3, "exit_code": 9},
]


def arguments(plan: SoakPlan, folder: Path) -> list[str]:
    """Return the service's arguments: capacity for the steady load, not for a whole burst."""
    cost = {"step_s": _STEP_S, "prefill_token_s": 0.0, "decode_slot_s": 0.0}
    model = (
        ["--executor", "torch", "--dtype", "float32", "--threads", "1"]
        if plan.is_torch
        else simulated(cost=cost, faults=_FAULTS)
    )
    return [
        *model,
        *("--fronts", "2", "--flight-folder", str(folder)),
        *("--max-num-seqs", str(plan.max_concurrent)),
        *("--max-num-waiting", str(max(16, plan.burst_size // 2))),
        *("--max-reader-stall-s", "5", "--drain-grace-s", "10", "--engine-hang-s", "3"),
    ]


async def run_soak(plan: SoakPlan, tell: Callable[[str], None]) -> SoakResult:
    """Run a plan. `tell` receives a progress line from time to time."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            service, operations = await stack.enter_async_context(
                observed(*arguments(plan, Path(folder)))
            )
            reference = await _reference(plan, service.address)
            watch = Watch(service, operations)
            lines = Lines(service.address, NUM_LINES)
            begun_s = ledger.begun_s = time.monotonic()
            load = await stack.enter_async_context(loaded(Load(plan, lines, reference, ledger)))
            striker = Striker(plan, service, load, watch, tell)
            async with _looking(watch, ledger, plan, tell):
                async with asyncio.TaskGroup() as group:
                    group.create_task(load.run())
                    group.create_task(striker.run())
                await load.end_holders()
                has_settled = await watch.until(is_quiet, plan.settle_s)
                last = [await load.canary() for _ in range(NUM_CANARIES)]
                has_settled &= await watch.until(is_quiet, plan.settle_s)
            seconds = time.monotonic() - begun_s
            service.signal(signal.SIGTERM)
            exit_code = await service.ended()
            watch.read_log()
    result = SoakResult(
        plan=plan,
        seconds=seconds,
        ledger=ledger,
        watch=watch,
        struck=sorted(striker.struck, key=lambda struck: struck.at_s),
        last_canaries=sum(not outcome.cause for outcome in last),
        num_last_canaries=NUM_CANARIES,
        is_quiet=has_settled,
        exit_code=exit_code,
        log=service.stderr[-200:],
    )
    judge(result)
    return result


async def _reference(plan: SoakPlan, address: str) -> Reference:
    if not plan.is_torch:
        return SimulatedReference()
    lines = Lines(address, 1)
    try:
        return await measured(lines.first, plan.max_tokens, plan.seed)
    finally:
        await lines.close()


@contextlib.asynccontextmanager
async def _looking(
    watch: Watch, ledger: Ledger, plan: SoakPlan, tell: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Run the watch inside the block, and print a line of progress every ten seconds."""

    async def talk() -> None:
        while True:
            await asyncio.sleep(10.0)
            tell(
                f"{time.monotonic() - ledger.begun_s:6.1f} s of {plan.seconds:.0f}:"
                f" {ledger.num_requests} requests, {ledger.num_errors} errors,"
                f" {len(ledger.wrong)} wrong, {len(watch.faults)} faults"
            )

    tasks = [asyncio.create_task(watch.run()), asyncio.create_task(talk())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
    if failures:
        raise failures[0]
