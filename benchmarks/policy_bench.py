"""The compared policies, their server, and the sections of the comparison.

A compared policy is called a contender. A section lists its trials first, so that all of them can
run in parallel.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.scheduler.config import EvictionPolicy
from penstock.tools.simulation.settings import UNBOUNDED_QUEUE, BatchingPolicy, SimulationConfig
from penstock.tools.simulation.transform import TransformConfig
from policy_sweep import Traffic, Trial, TrialResult, whole
from report_page import Table

Row = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A scheduling policy. `has_targets`: requests have a deadline for the first token, which the
    scheduler predicts, and there is an ITL target.
    """

    name: str
    policy: BatchingPolicy
    has_targets: bool = False
    max_num_batched_tokens: int = UNBOUNDED_QUEUE.max_num_batched_tokens

    def config(self, base: SimulationConfig) -> SimulationConfig:
        """Return the server's settings with this policy."""
        scheduler = dataclasses.replace(
            base.scheduler,
            deadline_admission=self.has_targets,
            target_itl_s=base.targets.itl_s if self.has_targets else None,
            max_num_batched_tokens=self.max_num_batched_tokens,
            # Only the fair policy uses the configured eviction; the others use LRU, as other
            # servers do.
            eviction=base.scheduler.eviction
            if self.policy is BatchingPolicy.FAIR
            else EvictionPolicy.LRU,
        )
        return dataclasses.replace(base, policy=self.policy, scheduler=scheduler)


STATIC = Contender(name="static", policy=BatchingPolicy.STATIC)
DYNAMIC = Contender(name="dynamic", policy=BatchingPolicy.DYNAMIC)
FCFS = Contender(name="fcfs", policy=BatchingPolicy.FCFS)
FAIR = Contender(name="fair", policy=BatchingPolicy.FAIR)
PENSTOCK = Contender(name="penstock", policy=BatchingPolicy.FAIR, has_targets=True)
CONTENDERS = (STATIC, DYNAMIC, FCFS, FAIR, PENSTOCK)


class Section(Protocol):
    """A section of the comparison."""

    @property
    def key(self) -> str:
        """The section's name in the raw results."""
        ...

    @property
    def trials(self) -> Sequence[Trial]:
        """The runs that the section needs."""
        ...

    def raw(self, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
        """Return the results of its trials, in their order, as JSON values."""
        ...

    def table(self, raw: Sequence[Mapping[str, Any]]) -> Table:
        """Return the raw results as a table."""
        ...


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
        traffic: Traffic = whole,
        base: SimulationConfig | None = None,
        ttft_deadline_s: float | None = None,
        deadline_s: float = math.inf,
        end_s: float = math.inf,
    ) -> Trial:
        """Return a trial at `load` times the capacity.

        `ttft_deadline_s`: None for the TTFT target if the contender `has_targets`, otherwise for no
        deadline. `end_s`: end of the part of the trace that is used.
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
