"""Measures the effect of an inter-token latency (ITL) target on different simulated machines.

Requests decode while an endless queue of prompts waits, so that prefill uses its whole budget. The
production engine learns the costs of each machine (`simulated_machines.py`) without a prior and
sizes its steps, in virtual time. Reports the ITL and the prefill rate, also for fixed budgets, and
whether the two step limits (prefill budget, batch size) become constant. The best fixed budget is
the power of two with the highest prefill rate whose p99 ITL meets the goal, chosen with hindsight
for the whole run.
"""

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

import numpy as np

from latency_run import END_SHARE, MAX_NUM_SEQS, Run, direction_changes, run_machine
from penstock.scheduler.config import SchedulerConfig
from report import Check, Outcome, arguments, print_rows, run
from simulated_machines import MACHINES, Machine

MAX_P99_RATIO = 1.10
MIN_STEADY_RATIO = 0.9
MIN_CHANGING_RATIO = 1.0
MAX_NOISY_TURNS = 10.0
"""Goal for noisy machines: direction changes of either limit per thousand steps."""
MIN_CROWD_SHARE = 0.9
MIN_DURATION_S = 10.0
"""Minimum duration of a run, seconds, for the fit to converge."""
_FIXED_TOKENS = (4096, 2048, 1024, 512, 256)
_DEFAULT_TOKENS = SchedulerConfig().max_num_batched_tokens
_ERRATIC_END = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFigures:
    """The figures of one simulated machine.

    Attributes:
        best_*: Figures with the best fixed budget; None if no fixed budget meets the goal, or none
            was tried.
        default_*: Figures with the default budget.
        *_turns: Direction changes of a limit in the `num_steady_steps` steps in which neither the
            machine nor the load changes.
        steady_p99_ms: The p99 duration of these steps.
        is_standing: Both limits were constant in the last tenth of the run.
        end_*: The limits after the last step, and the share of steps in the last quarter whose cost
            model was trusted.
        crowd_share: Decoding requests in the last tenth, as a share of the number that the target
            allows.
    """

    machine: str
    target_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    share_over: float
    prefill_per_s: float
    best_tokens: int | None
    best_p99_ms: float | None
    best_prefill_per_s: float | None
    default_p99_ms: float
    default_prefill_per_s: float
    num_steady_steps: int
    steady_p99_ms: float
    num_budget_turns: int
    num_limit_turns: int
    is_standing: bool
    end_budget: int
    end_limit: int
    end_trusted_share: float
    crowd_share: float

    def per_thousand(self, num_turns: int) -> float:
        """Return the direction changes per thousand steady steps."""
        return 1000.0 * num_turns / self.num_steady_steps


def row_of(machine: Machine, duration_s: float) -> MachineFigures:
    """Run a machine with the target, and with fixed budgets; return the figures."""
    run = run_machine(machine, SchedulerConfig(target_itl_s=machine.target_s), duration_s)
    default = _fixed(machine, _DEFAULT_TOKENS, duration_s)
    best = None if machine.is_erratic or machine.is_crowded else _best(machine, default, duration_s)
    steady = [run.within(*span) for span in machine.steady]
    end = run.within(1.0 - END_SHARE)
    return MachineFigures(
        machine=machine.name,
        target_ms=machine.target_s * 1e3,
        itl_p50_ms=run.itl_percentile_s(50.0) * 1e3,
        itl_p99_ms=run.itl_percentile_s(99.0) * 1e3,
        share_over=run.share_over(machine.target_s),
        prefill_per_s=run.prefill_per_s,
        best_tokens=best[0] if best else None,
        best_p99_ms=best[1].itl_percentile_s(99.0) * 1e3 if best else None,
        best_prefill_per_s=best[1].prefill_per_s if best else None,
        default_p99_ms=default.itl_percentile_s(99.0) * 1e3,
        default_prefill_per_s=default.prefill_per_s,
        num_steady_steps=int(sum(span.sum() for span in steady)),
        steady_p99_ms=float(np.percentile(run.step_s[np.any(steady, axis=0)], 99.0)) * 1e3,
        num_budget_turns=sum(direction_changes(run.budget[span]) for span in steady),
        num_limit_turns=sum(direction_changes(run.limit[span]) for span in steady),
        is_standing=not (np.ptp(run.budget[end]) or np.ptp(run.limit[end])),
        end_budget=int(run.budget[-1]),
        end_limit=int(run.limit[-1]),
        end_trusted_share=float(run.is_trusted[run.within(1.0 - _ERRATIC_END)].mean()),
        crowd_share=float(run.num_decodes[end].mean()) / machine.most_decoding,
    )


def _fixed(machine: Machine, num_tokens: int, duration_s: float) -> Run:
    return run_machine(machine, SchedulerConfig(max_num_batched_tokens=num_tokens), duration_s)


def _best(machine: Machine, default: Run, duration_s: float) -> tuple[int, Run] | None:
    """Among the fixed budgets that meet the goal, return the budget with the highest prefill rate,
    and its run. None if no budget meets the goal.
    """
    best: tuple[int, Run] | None = None
    for num_tokens in _FIXED_TOKENS:
        is_default = num_tokens == _DEFAULT_TOKENS
        run = default if is_default else _fixed(machine, num_tokens, duration_s)
        if run.itl_percentile_s(99.0) > MAX_P99_RATIO * machine.target_s:
            continue
        if best is not None and run.prefill_per_s <= best[1].prefill_per_s:
            # With smaller budgets the fixed cost of steps dominates.
            break
        best = num_tokens, run
    return best


def checks_of(machine: Machine, row: MachineFigures) -> list[Check]:
    """Return the checks that apply to this machine."""
    if machine.is_erratic:
        return [
            _check(row, "budget at the end over the fixed one", row.end_budget / _DEFAULT_TOKENS),
            _check(row, "limit at the end over the fixed one", row.end_limit / MAX_NUM_SEQS),
            _check(row, "steps with trust, last quarter", row.end_trusted_share, 0.0, "at most"),
        ]
    ratio = row.itl_p99_ms / row.target_ms
    checks = [_check(row, "p99 ITL over target", ratio, MAX_P99_RATIO, "at most")]
    if row.best_prefill_per_s:
        gain = row.prefill_per_s / row.best_prefill_per_s
        least = MIN_CHANGING_RATIO if machine.is_changing else MIN_STEADY_RATIO
        checks.append(_check(row, "prefill over best fixed budget", gain, least))
    if machine.is_crowded:
        share = row.crowd_share
        checks.append(_check(row, "decoding of those who may", share, MIN_CROWD_SHARE))
    most = MAX_NOISY_TURNS if machine.is_noisy else 0.0
    for name, num_turns in (("budget", row.num_budget_turns), ("limit", row.num_limit_turns)):
        value, unit = row.per_thousand(num_turns), "in 1,000 steps"
        checks.append(_check(row, f"turns of the {name}", value, most, "at most", unit))
    if not machine.is_noisy:
        checks.append(_check(row, "stands in the last tenth", float(row.is_standing)))
    return checks


def _check(
    row: MachineFigures,
    name: str,
    value: float,
    goal: float = 1.0,
    sense: Literal["at most", "at least"] = "at least",
    unit: str = "share",
) -> Check:
    return Check(name=f"{row.machine}: {name}", value=value, goal=goal, unit=unit, sense=sense)


def main() -> None:
    parser = arguments(__doc__)
    names = [machine.name for machine in MACHINES]
    add = parser.add_argument
    add("--machine", action="append", choices=names, help="run only this machine; repeatable")
    add("--duration-s", type=float, metavar="S", help="duration of each run, virtual seconds")

    def measure(options: Namespace) -> Outcome:
        duration_s: float = options.duration_s or (600.0 if options.full else 120.0)
        if not MIN_DURATION_S <= duration_s < math.inf:
            parser.error(f"--duration-s must be at least {MIN_DURATION_S:g}, not {duration_s}")
        machines = [one for one in MACHINES if not options.machine or one.name in options.machine]
        rows = [row_of(machine, duration_s) for machine in machines]
        print_rows(f"{duration_s:.0f} virtual seconds each", rows)
        checks = [checks_of(machine, row) for machine, row in zip(machines, rows, strict=True)]
        return rows, [check for each in checks for check in each]

    run(parser, measure)


if __name__ == "__main__":
    main()
