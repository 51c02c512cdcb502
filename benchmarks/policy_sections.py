"""Defines the compared policies, their server, and the sections of the comparison.

A compared policy is called a contender. A section only lists its trials; `policies.py` runs the
trials of all sections in parallel, and checks the goals.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from penstock.scheduler.config import EvictionPolicy
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import UNBOUNDED_QUEUE, BatchingPolicy, SimulationConfig
from penstock.tools.simulation.summary import Summary
from penstock.tools.simulation.transform import TransformConfig
from penstock.tools.targets import Targets
from policy_sweep import Traffic, Trial, TrialResult, unchanged

DEADLINE_KINDS = ("first token", "whole")
LOADS = (0.3, 0.6, 0.8, 1.0, 1.2, 1.5)
_LATE_LOADS = (0.8, 1.0, 1.2, 1.5)
_TIGHT_LOADS = (0.8, 1.0, 1.2)
_TIGHT_ITL_S = 0.040
_FIXED_BUDGETS = (512, 1024)
_TOTAL_S = 20.0
_NUM_FLOODS = 10
_CROWD_WINDOW_S = 600.0
QUIET, FLOOD = "quiet", "flood"
Raw: TypeAlias = dict[str, Any]
"""A row of results as JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A scheduling policy.

    `has_targets`: the scheduler sizes steps for the ITL target, and rejects requests that it
    predicts to miss their deadline. The deadline is the TTFT target unless a trial sets another
    deadline.
    """

    name: str
    policy: BatchingPolicy
    has_targets: bool = False
    max_num_batched_tokens: int = UNBOUNDED_QUEUE.max_num_batched_tokens

    def config(self, base: SimulationConfig) -> SimulationConfig:
        """Return the server's settings with this policy."""
        is_fair = self.policy is BatchingPolicy.FAIR
        scheduler = dataclasses.replace(
            base.scheduler,
            deadline_admission=self.has_targets,
            target_itl_s=base.targets.itl_s if self.has_targets else None,
            max_num_batched_tokens=self.max_num_batched_tokens,
            # Only the fair policy uses the configured eviction; the others use LRU, as other
            # servers do.
            eviction=base.scheduler.eviction if is_fair else EvictionPolicy.LRU,
        )
        return dataclasses.replace(base, policy=self.policy, scheduler=scheduler)


FCFS = Contender(name="fcfs", policy=BatchingPolicy.FCFS)
FAIR = Contender(name="fair", policy=BatchingPolicy.FAIR)
PENSTOCK = Contender(name="penstock", policy=BatchingPolicy.FAIR, has_targets=True)
CONTENDERS = (
    Contender(name="static", policy=BatchingPolicy.STATIC),
    Contender(name="dynamic", policy=BatchingPolicy.DYNAMIC),
    *(FCFS, FAIR, PENSTOCK),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The compared server: its settings, its targets, and its capacity (the maximum load at which
    FCFS meets the targets).
    """

    base: SimulationConfig
    capacity: float = 1.0

    def trial(
        self,
        contender: Contender,
        load: float,
        *,
        traffic: Traffic = unchanged,
        base: SimulationConfig | None = None,
        ttft_deadline_s: float | None = None,
        deadline_s: float = math.inf,
        end_s: float = math.inf,
    ) -> Trial:
        """Return a trial at `load` times the capacity.

        `ttft_deadline_s`: by default (None) the TTFT target if the contender `has_targets`,
        otherwise no deadline. `end_s`: where the trace is cut off.
        """
        base = self.base if base is None else base
        if ttft_deadline_s is None:
            ttft_deadline_s = base.targets.ttft_s if contender.has_targets else math.inf
        return Trial(
            name=f"{contender.name} at {load:.2f}",
            config=contender.config(base),
            traffic=traffic,
            transform=TransformConfig(
                load=load * self.capacity,
                end_s=end_s,
                ttft_deadline_s=ttft_deadline_s,
                deadline_s=deadline_s,
            ),
        )


def _summaries(labels: Sequence[Raw], results: Sequence[TrialResult]) -> list[Raw]:
    return [
        {**label, **dataclasses.asdict(result.summary)}
        for label, result in zip(labels, results, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the comparison.

    `key`: its name in the results. `trials`: the trials to run, each with the labels of its row.
    `raw`: converts their results to rows, by default one for each trial. `columns`: for each column
    name of the printed table, the function that computes a row's cell.
    """

    key: str
    title: str
    trials: Sequence[tuple[Raw, Trial]]
    columns: Mapping[str, Callable[[Raw], object]]
    raw: Callable[[Sequence[Raw], Sequence[TrialResult]], list[Raw]] = _summaries


def _of_all(name: str) -> Callable[[Raw], float]:
    """Return a function that computes a cell: the count in the row's field `name`, in per cent of
    all requests.
    """
    return lambda row: 100.0 * float(row[name]) / float(row["num_requests"])


_GOOD: dict[str, Callable[[Raw], object]] = {
    "load": lambda row: row["load"],
    "policy": lambda row: row["policy"],
    "good/s": lambda row: row["goodput_per_s"],
    "good %": lambda row: 100 * row["good_share"],
    "rejected %": _of_all("num_rejected"),
}


def rising_load(bench: Bench) -> Section:
    """Return the section with every contender at every load. Goodput and shares count all requests
    that were sent; TTFT counts only requests that got a token.
    """
    return Section(
        key="policies",
        title=f"Policies at rising load; load 1 is {bench.capacity:.2f} times the trace's",
        trials=[
            ({"load": load, "policy": one.name}, bench.trial(one, load))
            for load in LOADS
            for one in CONTENDERS
        ],
        columns={
            **_GOOD,
            "expired %": _of_all("num_expired"),
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


def tight_itl(bench: Bench) -> Section:
    """Return the section with an ITL target that a step with the full token budget misses. It also
    has FCFS with smaller fixed budgets. A user would have to choose such a budget for the traffic.
    """
    targets = Targets(ttft_s=bench.base.targets.ttft_s, itl_s=_TIGHT_ITL_S)
    base = dataclasses.replace(bench.base, targets=targets)
    fixed = [
        dataclasses.replace(FCFS, name=f"fcfs, {budget}", max_num_batched_tokens=budget)
        for budget in _FIXED_BUDGETS
    ]
    return Section(
        key="tight_itl",
        title=f"A target between tokens of {1e3 * _TIGHT_ITL_S:g} ms",
        trials=[
            ({"load": load, "policy": one.name}, bench.trial(one, load, base=base))
            for load in _TIGHT_LOADS
            for one in (*fixed, FCFS, FAIR, PENSTOCK)
        ],
        columns={
            **_GOOD,
            "TTFT p99 s": lambda row: row["ttft"]["p99_s"],
            "ITL p99 ms": lambda row: 1e3 * row["itl"]["p99_s"],
        },
    )


def deadlines(bench: Bench) -> Section:
    """Return the section in which all requests have a deadline, for the first token or for the
    complete output.

    FCFS predicts nothing: a request ends when its deadline passes, as if its client disconnected.
    Lost prefill: the share of computed prefill tokens whose requests later passed their deadline
    or were dropped because of it.
    """
    kinds = zip(
        DEADLINE_KINDS,
        ((bench.base.targets.ttft_s, math.inf), (math.inf, _TOTAL_S)),
        strict=True,
    )
    return Section(
        key="deadlines",
        title=f"Deadlines: the TTFT target, or {_TOTAL_S:g} s for the whole output",
        trials=[
            (
                {"deadline": kind, "load": load, "policy": one.name},
                bench.trial(one, load, ttft_deadline_s=ttft_s, deadline_s=total_s),
            )
            for kind, (ttft_s, total_s) in kinds
            for load in _LATE_LOADS
            for one in (FCFS, PENSTOCK)
        ],
        columns={
            "deadline": lambda row: row["deadline"],
            **_GOOD,
            "in time/s": lambda row: row["requests_per_s"],
            "in time %": _of_all("num_completed"),
            "expired %": _of_all("num_expired"),
            "lost prefill %": lambda row: 100 * row["prefill_waste"],
        },
    )


def quiet_tenant(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return every tenth request of the trace, as the requests of the low-rate tenant."""
    return [msgspec.structs.replace(request, tenant=QUIET) for request in trace[::10]]


def quiet_with_flood(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return the low-rate tenant's requests, and ten copies of the trace from another tenant."""
    return heapq.merge(quiet_tenant(trace), _flood(trace), key=attrgetter("arrival_s"))


def busy_with_flood(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return the trace as one tenant's requests, and ten copies of it as another tenant's."""
    busy = [msgspec.structs.replace(request, tenant="busy") for request in trace]
    return heapq.merge(busy, _flood(trace), key=attrgetter("arrival_s"))


def _flood(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    for request in trace:
        flooding = msgspec.structs.replace(request, tenant=FLOOD)
        for _ in range(_NUM_FLOODS):
            yield flooding


def neighbour(bench: Bench) -> Section:
    """Return the section with a tenant at a tenth of the capacity, alone and next to a flood of ten
    times the capacity. In the p99 TTFT, a request without a token counts as infinite.
    """

    def raw(labels: Sequence[Raw], results: Sequence[TrialResult]) -> list[Raw]:
        quiet = [of_tenant(result.summary, QUIET) for result in results]
        return [
            {**label, "flooded": flooded, "alone": alone}
            for label, flooded, alone in zip(labels[::2], quiet[::2], quiet[1::2], strict=True)
        ]

    return Section(
        key="neighbour",
        title="Quiet tenant at a tenth of capacity, beside a flood of ten times capacity",
        trials=[
            ({"policy": one.name}, bench.trial(one, 1.0, traffic=traffic))
            for one in (FCFS, FAIR, PENSTOCK)
            for traffic in (quiet_with_flood, quiet_tenant)
        ],
        raw=raw,
        columns={
            "policy": lambda row: row["policy"],
            "p50 alone s": lambda row: row["alone"]["ttft"]["p50_s"],
            "p50 beside s": lambda row: row["flooded"]["ttft"]["p50_s"],
            "p99 alone s": lambda row: row["alone"]["ttft_p99_of_all_s"],
            "p99 beside s": lambda row: row["flooded"]["ttft_p99_of_all_s"],
            "times": lambda row: slowdown(row),
            "good alone %": lambda row: 100 * row["alone"]["good_share"],
            "beside %": lambda row: 100 * row["flooded"]["good_share"],
            "late": lambda row: row["flooded"]["num_late"],
        },
    )


def slowdown(row: Raw) -> float:
    """Return the p99 TTFT next to the flood divided by the p99 TTFT alone; NaN if that is 0."""
    alone_s: float = row["alone"]["ttft_p99_of_all_s"]
    flooded_s: float = row["flooded"]["ttft_p99_of_all_s"]
    return flooded_s / alone_s if alone_s > 0.0 else math.nan


def of_tenant(summary: Summary, tenant: str) -> Raw:
    """Return the figures of one tenant as JSON values. Raises StopIteration if it is unknown."""
    return dataclasses.asdict(next(one for one in summary.tenants if one.tenant == tenant))


def served_shares(bench: Bench) -> Section:
    """Return the section with two tenants: one demands the whole capacity, the other ten times as
    much.

    "Most over least" is the ratio of the tenants' service in weighted tokens, while both had
    requests waiting.
    """
    return Section(
        key="served_shares",
        title="One tenant wants all of the capacity, the other ten times that",
        trials=[
            (
                {"load": 1.0, "policy": one.name},
                bench.trial(one, 1.0, traffic=busy_with_flood, end_s=_CROWD_WINDOW_S),
            )
            for one in (FCFS, FAIR, PENSTOCK)
        ],
        columns={**_GOOD, "most over least": lambda row: row["served_ratio"]},
    )


def speed(bench: Bench, hours: float) -> Section:
    """Return the section with the simulator's CPU time for the unmodified trace of `hours` hours,
    per hour of traffic.
    """

    def raw(labels: Sequence[Raw], results: Sequence[TrialResult]) -> list[Raw]:
        return [
            {
                **label,
                "cpu_s_per_hour": result.cpu_s / hours,
                "num_steps": result.summary.num_steps,
                "step_us": 1e6 * result.cpu_s / result.summary.num_steps,
            }
            for label, result in zip(labels, results, strict=True)
        ]

    return Section(
        key="speed",
        title="The simulator: CPU time for an hour of the trace as it was recorded",
        trials=[
            ({"policy": one.name}, bench.trial(one, 1.0 / bench.capacity))
            for one in (FCFS, PENSTOCK)
        ],
        raw=raw,
        columns={
            "policy": lambda row: row["policy"],
            "CPU s per hour": lambda row: row["cpu_s_per_hour"],
            "steps": lambda row: row["num_steps"],
            "us per step": lambda row: row["step_us"],
        },
    )
