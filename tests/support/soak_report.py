"""The judgement of a soak: gates, and the report as text.

Owns what must hold. Knows only what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from support.soak_ledger import HUNG, Kind, Ledger
from support.soak_plan import SoakPlan
from support.soak_strikes import Struck
from support.soak_watch import Memory, Watch

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
    """Something that must hold."""

    name: str
    value: str
    goal: str
    holds: bool


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """All that was seen. `last_canaries`: of the quiet service at the end, how many were right.

    `log`: the service's last lines, which the report has when a gate did not hold.
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
    """Write down every gate."""
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
    """Of processes that lived long enough to report growth from their first allocations."""
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
    """The gates, what was asked, what was struck, and of a failure what was seen."""
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
