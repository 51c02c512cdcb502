"""The comparison's parts about the prefix cache and about the simulator itself.

Computes the cache's reference values and reports the simulator's speed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimal_cache import least_recent_hit_rate, optimal_hit_rate
from penstock.scheduler.config import EvictionPolicy
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import SimulationConfig
from policy_bench import FAIR, FCFS, PENSTOCK, Bench, Contender
from policy_sweep import Trial, TrialResult
from report_page import Table, table_of

EVICTIONS = (EvictionPolicy.HIT_DENSITY, EvictionPolicy.LRU)
CACHE_TOKENS = (1_000_000, 2_000_000, 4_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """Hits of the prefix cache at three memory sizes, compared with those of Belady's rule."""

    bench: Bench
    trace: Sequence[TraceRequest]
    load: float = 0.5
    key: str = "prefix_reuse"

    @property
    def trials(self) -> list[Trial]:
        return [
            self.bench.trial(FAIR, self.load, base=self._server(num_blocks, eviction))
            for eviction in EVICTIONS
            for num_blocks in self._sizes
        ]

    def _server(self, num_blocks: int, eviction: EvictionPolicy) -> SimulationConfig:
        base = self.bench.base
        scheduler = dataclasses.replace(base.scheduler, eviction=eviction)
        return dataclasses.replace(base, num_blocks=num_blocks, scheduler=scheduler)

    @property
    def _sizes(self) -> list[int]:
        return [num_tokens // self.bench.base.block_size for num_tokens in CACHE_TOKENS]

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        block_size = self.bench.base.block_size
        num_sizes = len(self._sizes)
        ours, least_recent = results[:num_sizes], results[num_sizes:]
        for num_blocks, result, lru in zip(self._sizes, ours, least_recent, strict=True):
            used = result.summary.kv_utilisation
            num_tokens = num_blocks * block_size
            # Blocks of running requests are unavailable for caching.
            bounds = [
                optimal_hit_rate(self.trace, num_cache_tokens=num, block_size=block_size)
                for num in (num_tokens, int(num_tokens * (1.0 - used)))
            ]
            rows.append(
                {
                    "num_cache_tokens": num_tokens,
                    "kv_utilisation": used,
                    "hits": result.summary.prefix_hit_rate,
                    "hits_least_recent": lru.summary.prefix_hit_rate,
                    "least_recent_all": least_recent_hit_rate(
                        self.trace, num_cache_tokens=num_tokens, block_size=block_size
                    ),
                    "belady_all": bounds[0],
                    "belady_free": bounds[1],
                }
            )
        return rows

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        return table_of(
            "Prefix hits at half the capacity, beside Belady's rule",
            "Belady's rule knows the future, caches a prompt the moment it arrives and"
            " evicts what is needed last; with all of the memory, and (free) with what the running"
            " requests leave on average. By LRU: the engine with that eviction. Ideal LRU: that"
            " rule with all of the memory, under Belady's conditions.",
            raw,
            {
                "tokens": lambda row: f"{row['num_cache_tokens']:,}",
                "running %": lambda row: 100 * row["kv_utilisation"],
                "hits %": lambda row: 100 * row["hits"],
                "by LRU %": lambda row: 100 * row["hits_least_recent"],
                "ideal LRU %": lambda row: 100 * row["least_recent_all"],
                "Belady %": lambda row: 100 * row["belady_all"],
                "share": lambda row: row["hits"] / row["belady_all"],
                "free %": lambda row: 100 * row["belady_free"],
                "share of free": lambda row: row["hits"] / row["belady_free"],
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The simulator's run time for the unmodified trace."""

    bench: Bench
    hours: float
    contenders: tuple[Contender, ...] = (FCFS, PENSTOCK)
    key: str = "speed"

    @property
    def trials(self) -> list[Trial]:
        return [self.bench.trial(one, 1.0 / self.bench.capacity) for one in self.contenders]

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        return [
            {
                "policy": one.name,
                "cpu_s": result.cpu_s,
                # Reported per hour of traffic, because the quick run is shorter.
                "cpu_s_per_hour": result.cpu_s / self.hours,
                "num_steps": result.summary.num_steps,
            }
            for one, result in zip(self.contenders, results, strict=True)
        ]

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        return table_of(
            "The simulator: an hour of the trace as it was recorded",
            "CPU time of one process.",
            raw,
            {
                "policy": lambda row: row["policy"],
                "CPU s per hour": lambda row: row["cpu_s_per_hour"],
                "steps": lambda row: row["num_steps"],
                "us per step": lambda row: 1e6 * row["cpu_s"] / row["num_steps"],
            },
        )
