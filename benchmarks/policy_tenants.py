"""The comparison's section about tenants: a low-rate tenant next to a flood, and two tenants that
both overload the service.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.summary import Summary
from policy_bench import FAIR, FCFS, PENSTOCK, Bench, Contender
from policy_sweep import Trial, TrialResult
from report_page import Table, table_of

NUM_FLOODS = 10
CROWD_WINDOW_S = 600.0
QUIET = "quiet"
FLOOD = "flood"


def quiet_tenant(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return every tenth request of the trace."""
    return [msgspec.structs.replace(request, tenant=QUIET) for request in trace[::10]]


def quiet_with_flood(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return the low-rate tenant's requests, and ten copies of the trace from another tenant."""
    return heapq.merge(quiet_tenant(trace), _flood(trace), key=attrgetter("arrival_s"))


def busy_with_flood(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return the requests of a tenant with the whole trace, and of a tenant with ten times as
    many.
    """
    busy = [msgspec.structs.replace(request, tenant="busy") for request in trace]
    return heapq.merge(busy, _flood(trace), key=attrgetter("arrival_s"))


def _flood(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    for request in trace:
        flooding = msgspec.structs.replace(request, tenant=FLOOD)
        for _ in range(NUM_FLOODS):
            yield flooding


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyNeighbour:
    """A tenant with a tenth of the capacity, alone and next to a flood of ten times the capacity,
    on equal engines.

    Both tenants have the lengths of the trace.
    """

    bench: Bench
    contenders: tuple[Contender, ...] = (FCFS, FAIR, PENSTOCK)
    key: str = "neighbour"

    @property
    def trials(self) -> list[Trial]:
        return [
            self.bench.trial(one, 1.0, traffic=traffic)
            for one in self.contenders
            for traffic in (quiet_with_flood, quiet_tenant)
        ]

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        return [
            {
                "policy": one.name,
                "beside": _of_tenant(results[2 * index].summary, QUIET),
                "alone": _of_tenant(results[2 * index + 1].summary, QUIET),
            }
            for index, one in enumerate(self.contenders)
        ]

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        return table_of(
            "Quiet tenant at a tenth of capacity, beside a flood of ten times capacity",
            "In p99 a request without a token counts as infinite.",
            raw,
            {
                "policy": lambda row: row["policy"],
                "p50 alone s": lambda row: row["alone"]["ttft"]["p50_s"],
                "p50 beside s": lambda row: row["beside"]["ttft"]["p50_s"],
                "p99 alone s": lambda row: row["alone"]["ttft_p99_of_all_s"],
                "p99 beside s": lambda row: row["beside"]["ttft_p99_of_all_s"],
                "times": lambda row: slowdown(row),
                "good alone %": lambda row: 100 * row["alone"]["good_share"],
                "beside %": lambda row: 100 * row["beside"]["good_share"],
                "late": lambda row: row["beside"]["num_late"],
            },
        )


def slowdown(row: Mapping[str, Any]) -> float:
    """Return the p99 TTFT next to the flood divided by the p99 TTFT alone."""
    alone_s: float = row["alone"]["ttft_p99_of_all_s"]
    beside_s: float = row["beside"]["ttft_p99_of_all_s"]
    return beside_s / alone_s if alone_s > 0.0 else math.nan


def _of_tenant(summary: Summary, tenant: str) -> dict[str, Any]:
    return dataclasses.asdict(next(one for one in summary.tenants if one.tenant == tenant))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShares:
    """Two tenants that both demand more than the capacity, one of them ten times as much."""

    bench: Bench
    contenders: tuple[Contender, ...] = (FCFS, FAIR, PENSTOCK)
    key: str = "served_shares"

    @property
    def trials(self) -> list[Trial]:
        return [
            self.bench.trial(one, 1.0, traffic=busy_with_flood, end_s=CROWD_WINDOW_S)
            for one in self.contenders
        ]

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        return [
            {"policy": one.name, **dataclasses.asdict(result.summary)}
            for one, result in zip(self.contenders, results, strict=True)
        ]

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        return table_of(
            "One tenant wants all of the capacity, the other ten times that",
            "Most over least served tenant, in weighted tokens, while both had requests"
            " waiting: 1 is even.",
            raw,
            {
                "policy": lambda row: row["policy"],
                "most over least": lambda row: row["served_ratio"],
                "good/s": lambda row: row["goodput_per_s"],
                "good %": lambda row: 100 * row["good_share"],
                "rejected %": lambda row: 100 * row["num_rejected"] / row["num_requests"],
            },
        )
