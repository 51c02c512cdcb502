"""The comparison's sections about load: every policy at increasing load, a tight target, deadlines.

`policies.py` checks the goals.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tools.targets import Targets
from policy_bench import CONTENDERS, FAIR, FCFS, PENSTOCK, Bench, Contender
from policy_sweep import Trial, TrialResult
from report_page import Table, table_of

DEADLINE_KINDS = ("first token", "whole")
LOADS = (0.3, 0.6, 0.8, 1.0, 1.2, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RisingLoad:
    """Runs every contender at every load."""

    bench: Bench
    key: str = "policies"

    @property
    def trials(self) -> list[Trial]:
        return [self.bench.trial(one, load) for load in LOADS for one in CONTENDERS]

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        names = [(load, one.name) for load in LOADS for one in CONTENDERS]
        return [
            {"load": load, "policy": name, **dataclasses.asdict(result.summary)}
            for (load, name), result in zip(names, results, strict=True)
        ]

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        targets = self.bench.base.targets
        return table_of(
            f"Policies at rising load; load 1 is {self.bench.capacity:.2f} times the trace's",
            f"Good: first token within {targets.ttft_s:g} s and 99 % of the gaps within"
            f" {1e3 * targets.itl_s:g} ms. Goodput and shares are of all requests that were"
            " offered: rejected and expired requests are not good. TTFT is of requests with a"
            " token; penstock rejects what it could not serve in time, so its TTFT is of fewer"
            " requests than the others'. fair is penstock's order alone, without deadlines and"
            " without the target between tokens.",
            raw,
            {
                "load": lambda row: row["load"],
                "policy": lambda row: row["policy"],
                "good/s": lambda row: row["goodput_per_s"],
                "good %": lambda row: 100 * row["good_share"],
                "rejected %": lambda row: 100 * row["num_rejected"] / row["num_requests"],
                "expired %": lambda row: 100 * row["num_expired"] / row["num_requests"],
                "TTFT p50 s": lambda row: row["ttft"]["p50_s"],
                "p99 s": lambda row: row["ttft"]["p99_s"],
                "ITL p50 ms": lambda row: 1e3 * row["itl"]["p50_s"],
                "p99 ms": lambda row: 1e3 * row["itl"]["p99_s"],
                "tokens/s": lambda row: row["output_tokens_per_s"],
                "KV %": lambda row: 100 * row["kv_utilisation"],
                "waste %": lambda row: 100 * row["kv_waste"],
                "hits %": lambda row: 100 * row["prefix_hit_rate"],
                "preempted": lambda row: row["num_preemptions"],
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TightItl:
    """Runs with an ITL target that a step with the full budget misses; FCFS with several fixed
    token budgets.
    """

    bench: Bench
    itl_s: float
    budgets: tuple[int, ...] = (512, 1024)
    loads: tuple[float, ...] = (0.8, 1.0, 1.2)
    key: str = "tight_itl"

    @property
    def _contenders(self) -> tuple[Contender, ...]:
        smaller = (
            dataclasses.replace(FCFS, name=f"fcfs, {budget}", max_num_batched_tokens=budget)
            for budget in self.budgets
            if budget >= self.bench.base.max_num_seqs
        )
        return (*smaller, FCFS, FAIR, PENSTOCK)

    @property
    def trials(self) -> list[Trial]:
        targets = Targets(ttft_s=self.bench.base.targets.ttft_s, itl_s=self.itl_s)
        base = dataclasses.replace(self.bench.base, targets=targets)
        return [
            self.bench.trial(one, load, base=base)
            for load in self.loads
            for one in self._contenders
        ]

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        names = [(load, one.name) for load in self.loads for one in self._contenders]
        return [
            {"load": load, "policy": name, **dataclasses.asdict(result.summary)}
            for (load, name), result in zip(names, results, strict=True)
        ]

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        return table_of(
            f"What a target between tokens does: {1e3 * self.itl_s:g} ms",
            "A step that is full of prefill takes longer than this target. FCFS has a fixed"
            " token budget (named where it is not the default) that must be chosen for the"
            " traffic; penstock is given the target and sizes every step by the prices it has"
            " learnt.",
            raw,
            {
                "load": lambda row: row["load"],
                "policy": lambda row: row["policy"],
                "good/s": lambda row: row["goodput_per_s"],
                "good %": lambda row: 100 * row["good_share"],
                "rejected %": lambda row: 100 * row["num_rejected"] / row["num_requests"],
                "TTFT p99 s": lambda row: row["ttft"]["p99_s"],
                "ITL p99 ms": lambda row: 1e3 * row["itl"]["p99_s"],
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Runs in which all requests have deadlines, for the first token or for the complete output, at
    loads up to and beyond capacity.
    """

    bench: Bench
    loads: tuple[float, ...] = (0.8, 1.0, 1.2, 1.5)
    contenders: tuple[Contender, ...] = (FCFS, PENSTOCK)
    total_s: float = 20.0
    key: str = "deadlines"

    @property
    def trials(self) -> list[Trial]:
        trials: list[Trial] = []
        for is_whole in (False, True):
            ttft_s = math.inf if is_whole else self.bench.base.targets.ttft_s
            total_s = self.total_s if is_whole else math.inf
            trials += [
                self.bench.trial(one, load, ttft_deadline_s=ttft_s, deadline_s=total_s)
                for load in self.loads
                for one in self.contenders
            ]
        return trials

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        names = [
            (kind, load, one.name)
            for kind in DEADLINE_KINDS
            for load in self.loads
            for one in self.contenders
        ]
        return [
            {"deadline": kind, "load": load, "policy": name, **dataclasses.asdict(result.summary)}
            for (kind, load, name), result in zip(names, results, strict=True)
        ]

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        target_s = self.bench.base.targets.ttft_s
        return table_of(
            f"Deadlines: {target_s:g} s for the first token, or {self.total_s:g} s in all",
            "Under fcfs a deadline counts when it passes, as when a client hangs up. In time:"
            " completed before its deadline, whatever the targets. Good: in time, and within the"
            " targets for the first token and between tokens, of which the scheduler is told the"
            " second alone where the deadline is for the whole answer. Lost:"
            " prefill computed for requests that then expired or were given up, of all prefill.",
            raw,
            {
                "deadline": lambda row: row["deadline"],
                "load": lambda row: row["load"],
                "policy": lambda row: row["policy"],
                "in time/s": lambda row: row["requests_per_s"],
                "in time %": lambda row: 100 * row["num_completed"] / row["num_requests"],
                "rejected %": lambda row: 100 * row["num_rejected"] / row["num_requests"],
                "expired %": lambda row: 100 * row["num_expired"] / row["num_requests"],
                "lost prefill %": lambda row: 100 * row["prefill_waste"],
                "good/s": lambda row: row["goodput_per_s"],
                "good %": lambda row: 100 * row["good_share"],
            },
        )
