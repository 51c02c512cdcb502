"""The compared policies, their server, and the parts of the comparison.

Owns the contenders and how their runs are set up. A part lists its trials first, so that all of
them can run in parallel.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.scheduler.config import EvictionPolicy
from penstock.tools.simulation.settings import UNBOUNDED_QUEUE, Policy, SimulationConfig
from penstock.tools.simulation.transform import TransformConfig
from policy_sweep import Traffic, Trial, TrialResult, whole
from report_page import Table

Row = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A scheduling policy. `is_told`: requests carry the deadline of their first token, the
    scheduler predicts late requests and has the ITL target; otherwise it gets neither."""

    name: str
    policy: Policy
    is_told: bool = False
    max_num_batched_tokens: int = UNBOUNDED_QUEUE.max_num_batched_tokens

    def config(self, base: SimulationConfig) -> SimulationConfig:
        """Return the server with this policy."""
        scheduler = dataclasses.replace(
            base.scheduler,
            deadline_admission=self.is_told,
            target_itl_s=base.targets.itl_s if self.is_told else None,
            max_num_batched_tokens=self.max_num_batched_tokens,
            # Only the fair policy uses the configured eviction; the others use LRU, as servers do.
            eviction=base.scheduler.eviction if self.policy is Policy.FAIR else EvictionPolicy.LRU,
        )
        return dataclasses.replace(base, policy=self.policy, scheduler=scheduler)


STATIC = Contender(name="static", policy=Policy.STATIC)
DYNAMIC = Contender(name="dynamic", policy=Policy.DYNAMIC)
FCFS = Contender(name="fcfs", policy=Policy.FCFS)
FAIR = Contender(name="fair", policy=Policy.FAIR)
PENSTOCK = Contender(name="penstock", policy=Policy.FAIR, is_told=True)
CONTENDERS = (STATIC, DYNAMIC, FCFS, FAIR, PENSTOCK)


class Section(Protocol):
    """A part of the comparison."""

    @property
    def key(self) -> str:
        """Its name in the raw results."""
        ...

    @property
    def trials(self) -> Sequence[Trial]:
        """The runs it needs."""
        ...

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        """Return the results of its trials, in their order, as JSON values."""
        ...

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        """Return the raw results as a table."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One simulated server, and the load at which FCFS just meets the targets on it."""

    base: SimulationConfig
    capacity: float = 1.0

    def trial(
        self,
        contender: Contender,
        load: float,
        *,
        traffic: Traffic = whole,
        base: SimulationConfig | None = None,
        ttft_deadline_s: float | None = None,
        deadline_s: float = math.inf,
        end_s: float = math.inf,
    ) -> Trial:
        """Return a trial at `load` times the capacity. `ttft_deadline_s`: None: the TTFT target if
        the contender `is_told`, otherwise no deadline. `end_s`: end of the part of the trace that
        is used."""
        base = self.base if base is None else base
        if ttft_deadline_s is None:
            ttft_deadline_s = base.targets.ttft_s if contender.is_told else math.inf
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
