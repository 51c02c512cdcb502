"""The judgement of a soak: gates, and the report as Markdown and JSON.

Owns what must hold. Knows only what was seen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

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

    `log`: the service's last lines, which the JSON report has when a gate did not hold.
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
    """Of processes that lived long enough to tell growth from their first allocations."""
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


def as_json(result: SoakResult) -> str:
    """Everything, for machines."""
    ledger, watch = result.ledger, result.watch
    told: dict[str, Any] = {
        "holds": result.holds,
        "seconds": round(result.seconds, 1),
        "plan": asdict(result.plan),
        "gates": [asdict(gate) for gate in result.gates],
        "requests": {kind.value: ledger.num[kind] for kind in Kind},
        "num_shed": ledger.num_shed,
        "num_resumed": ledger.num_resumed,
        "num_refusals": ledger.num_refusals,
        "num_tokens": ledger.num_tokens,
        "errors": {f"{kind}: {cause}": num for (kind, cause), num in ledger.causes.items()},
        "wrong": ledger.wrong[:100],
        "faults": watch.faults[:100],
        "strikes": [asdict(struck) for struck in result.struck],
        "log": [] if result.holds else result.log,
        "most_used_blocks": watch.most_used_blocks,
        "memory": [
            {
                "role": memory.role,
                "pid": memory.pid,
                "seconds": round(memory.seconds, 1),
                "first_mib": round(memory.samples_bytes[0] / 2**20, 1),
                "last_mib": round(memory.samples_bytes[-1] / 2**20, 1),
                "growth_after_warm_up_mib": round(memory.growth_bytes(WARM_UP_S) / 2**20, 2),
                "slope_kib_per_s": round(memory.slope_bytes_per_s(WARM_UP_S) / 2**10, 2),
            }
            for memory in watch.memory.values()
        ],
    }
    return json.dumps(told, indent=2) + "\n"


def as_markdown(result: SoakResult) -> str:
    """The same for people."""
    told = json.loads(as_json(result))
    lines = [
        f"# Soak: {'passed' if result.holds else 'FAILED'}",
        "",
        f"{result.seconds:.0f} s, seed {result.plan.seed}, {result.plan.num_streams} steady"
        f" streams, bursts of {result.plan.burst_size},"
        f" {'the demo model' if result.plan.is_torch else 'simulated executor'};"
        f" {told['num_tokens']} tokens checked, {told['num_resumed']} requests resumed,"
        f" {told['num_shed']} shed.",
        "",
        *_table("gate", "value", "goal", "holds"),
        *(
            f"| {gate.name} | {gate.value} | {gate.goal} | {'yes' if gate.holds else 'NO'} |"
            for gate in result.gates
        ),
        "",
        *_table("requests", "number"),
        *(f"| {kind} | {count} |" for kind, count in told["requests"].items()),
        "",
        *_table("error", "number"),
        *(f"| {cause} | {count} |" for cause, count in told["errors"].items()),
        "",
        *_table("strike", "at, s", "a canary was served after, s"),
        *(
            f"| {one.strike} | {one.at_s:.1f} |"
            f" {'never: ' + one.note if one.recovery_s is None else f'{one.recovery_s:.2f}'} |"
            for one in result.struck
        ),
        "",
        *_table("process", "lived, s", "first, MiB", "last, MiB", "slope, KiB/s"),
        *(
            f"| {one['role']} {one['pid']} | {one['seconds']} | {one['first_mib']} |"
            f" {one['last_mib']} | {one['slope_kib_per_s']} |"
            for one in told["memory"]
        ),
        "",
        *(f"- {line}" for line in [*told["wrong"], *told["faults"]]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
