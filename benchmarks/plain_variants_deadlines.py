"""Measures how many deadlines are met with plain variants of what predicts them (see
`plain_variants.py`): the variants of output lengths, the traffic, and the figures of a run.
"""

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.output_lengths import (
    Exploration,
    LengthDistribution,
    OutputBounds,
    OutputLengths,
    RunningOutputs,
)
from penstock.scheduler.step_fit import StepFit
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation import settings
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import has_outcome, summarise
from penstock.tools.simulation.synthetic import SyntheticConfig, TenantShare, synthetic_trace
from penstock.tools.simulation.transform import TransformConfig, transformed
from penstock.tools.simulation.watched_executor import WatchedExecutor
from policies import SYNTHETIC
from simulated_machines import Machine, MachineExecutor

_MIN_LENGTHS = 16
_ENDLESS = 2**31
_NO_TENANT = "\0"
"""The name of no tenant."""
_LATE = (
    "ttft_deadline_exceeded",
    "deadline_exceeded",
    "ttft_deadline_unreachable",
    "deadline_unreachable",
)
WHOLE_S, _SHORT_S, _CHANGED_S = 20.0, 5.0, 2.0
"""Deadlines for the whole output, seconds."""
_SHORT_TOKENS, _LONG_TOKENS = 100.0, 1500.0
"""Mean output lengths. A request that runs alone generates about 1,200 tokens in `_SHORT_S`."""
_NUM_TENANTS = 500
_PHASE_S = 60


class NoNewTenants(Exploration):
    """Predicts the requests of a new tenant from the outputs of other tenants."""

    def explores_new_tenant(self, tenant: str, num_seen: int, now: float) -> bool:
        """Return False: no tenant counts as new."""
        del tenant, num_seen, now
        return False


class NoUnlikely(Exploration):
    """Admits no request that the learned lengths would reject."""

    def explores_unlikely(self, tenant: str) -> bool:
        """Return False: every such request is rejected."""
        del tenant
        return False


class NoExploration(NoNewTenants, NoUnlikely):
    """Admits no request to learn output lengths."""


class OneGroup(OutputLengths):
    """Learns one distribution for all tenants and limits."""

    def distribution(
        self, tenant: str, max_tokens: int, running: Callable[[], RunningOutputs] = RunningOutputs
    ) -> LengthDistribution | None:
        """Return the distribution of all outputs; None while there are too few samples."""
        del tenant, max_tokens
        return super().distribution(_NO_TENANT, 0, running)


class ShortMemory(OutputLengths):
    """Gives observations from 64 requests ago the weight 1/e."""

    def __init__(self) -> None:
        super().__init__(memory=64)


class LastLengths(OutputLengths):
    """Predicts from the last `num_kept` output lengths of all requests. A truncated output counts
    as one that ended, or as endless (`is_cut_endless`); running outputs do not count.
    """

    num_kept = 256
    is_cut_endless = False

    def __init__(self) -> None:
        super().__init__()
        self._last: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=self.num_kept))

    def observe(
        self, num_tokens: int, *, is_cut: bool = False, tenant: str = "", max_tokens: int = 0
    ) -> None:
        """Record a request that ended after `num_tokens` output tokens."""
        super().observe(num_tokens, is_cut=is_cut, tenant=tenant, max_tokens=max_tokens)
        length = _ENDLESS if is_cut and self.is_cut_endless else num_tokens
        self._last[_NO_TENANT].append(length)
        self._last[tenant].append(length)

    def distribution(
        self, tenant: str, max_tokens: int, running: Callable[[], RunningOutputs] = RunningOutputs
    ) -> LengthDistribution | None:
        """Return the quantiles of the last outputs; None while there are too few."""
        del tenant, max_tokens, running
        return self._quantiles_of(_NO_TENANT)

    def _quantiles_of(self, tenant: str) -> LengthDistribution | None:
        last = self._last[tenant]
        return SortedLengths(sorted(last)) if len(last) >= _MIN_LENGTHS else None


class OwnLastLengths(LastLengths):
    """Predicts from the last output lengths of the tenant; of all requests, if it has too few."""

    def distribution(
        self, tenant: str, max_tokens: int, running: Callable[[], RunningOutputs] = RunningOutputs
    ) -> LengthDistribution | None:
        """Return the quantiles of the tenant's last outputs; None while there are too few."""
        own = self._quantiles_of(tenant)
        return super().distribution(tenant, max_tokens, running) if own is None else own


class SortedLengths(LengthDistribution):
    """The quantiles of some output lengths, `lengths` [n], ascending; chances by Laplace's rule of
    succession.
    """

    __slots__ = ("_lengths",)

    def __init__(self, lengths: list[int]) -> None:
        super().__init__([])
        self._lengths = lengths

    def chance_within(self, num_tokens: int, bounds: OutputBounds) -> float:
        """Return the probability that the output has at most `num_tokens` tokens in total."""
        if num_tokens >= bounds.max_tokens:
            return 1.0
        if num_tokens < bounds.least:
            return 0.0
        start = bisect_left(self._lengths, bounds.least)
        num_within = bisect_left(self._lengths, num_tokens + 1) - start
        return (num_within + 1) / (len(self._lengths) - start + 2)

    def tokens_with(self, chance: float, bounds: OutputBounds) -> int:
        """Return the smallest number n, within the bounds, such that the output has at most n
        tokens in total with a probability of at least `chance`.
        """
        start = bisect_left(self._lengths, bounds.least)
        num_within = ceil(chance * (len(self._lengths) - start + 2) - 1)
        if num_within <= 0:
            return bounds.least
        if start + num_within > len(self._lengths):
            return bounds.max_tokens
        return min(self._lengths[start + num_within - 1], bounds.max_tokens)


class FixedFit(StepFit):
    """Keeps the coefficients that it starts with."""

    def _learn(
        self, features: list[float], residual: float, limit: float, memory_steps: float
    ) -> None:
        """Learn nothing."""

    def _affects_all_steps(self, factor: float) -> bool:
        """Return False, so that no coefficient is rescaled."""
        del factor
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineRow:
    """What became of the requests of one run, in % of all requests. `lost_prefill_percent`: of all
    prefill tokens.

    `rejected_percent`: rejected before any computation. `wrongly_percent`: those of them that are
    in time if nothing is predicted. `missed_percent`: late or dropped after their admission.
    """

    traffic: str
    variant: str
    in_time_percent: float
    rejected_percent: float
    wrongly_percent: float
    missed_percent: float
    lost_prefill_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Which requests of a run were late, and which were admitted, bool [n]; the share of prefill
    tokens computed for late ones.
    """

    is_late: NDArray[np.bool_]
    was_admitted: NDArray[np.bool_]
    lost_prefill: float

    def row(self, traffic: str, variant: str, unpredicted: "Outcomes") -> DeadlineRow:
        """Return the row of this run; `unpredicted`: the run without predictions."""
        is_rejected = self.is_late & ~self.was_admitted
        return DeadlineRow(
            traffic=traffic,
            variant=variant,
            in_time_percent=100 * float((~self.is_late).mean()),
            rejected_percent=100 * float(is_rejected.mean()),
            wrongly_percent=100 * float((is_rejected & ~unpredicted.is_late).mean()),
            missed_percent=100 * float((self.is_late & self.was_admitted).mean()),
            lost_prefill_percent=100 * self.lost_prefill,
        )


def outcomes(requests: Sequence[TraceRequest], config: SimulationConfig) -> Outcomes:
    """Simulate; return what became of the requests."""
    run = simulate(requests, config)
    table = run.recorder.table
    return Outcomes(
        is_late=has_outcome(table, _LATE),
        was_admitted=~np.isnan(table.seconds("admitted_s")),
        lost_prefill=summarise(run).prefill_waste,
    )


def without_predictions(config: SimulationConfig) -> SimulationConfig:
    """Return the settings of a server that rejects no request for its predicted end."""
    scheduler = replace(config.scheduler, deadline_admission=False)
    return replace(config, scheduler=scheduler)


@contextmanager
def on_machine(machine: Machine, duration_s: float) -> Generator[None]:
    """Inside the block, simulations run on this machine; see `MachineExecutor`."""
    executor = partial(MachineExecutor, machine, duration_s)
    setattr(settings, "WatchedExecutor", executor)  # noqa: B010
    try:
        yield
    finally:
        setattr(settings, "WatchedExecutor", WatchedExecutor)  # noqa: B010


def at_rate(
    trace: Sequence[TraceRequest], rate_per_s: float, *, ttft_s: float = inf, total_s: float = inf
) -> list[TraceRequest]:
    """Return the requests at another mean rate, with deadlines in seconds after arrival."""
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    load = rate_per_s * span_s / len(trace)
    config = TransformConfig(load=load, ttft_deadline_s=ttft_s, deadline_s=total_s)
    return list(transformed(trace, config))


def length_traffic(rate_per_s: float) -> dict[str, list[TraceRequest]]:
    """Return the synthetic traffic for the variants of output lengths, by name, with deadlines for
    the whole output. `rate_per_s`: the rate of the long prompts of `policies.py`; the other
    rates are fixed.
    """
    many = tuple(TenantShare(name=f"tenant {number}") for number in range(_NUM_TENANTS))
    long_prompts = SYNTHETIC["long-prompts"]
    several = replace(long_prompts, tenants=many)
    return {
        "one tenant": at_rate([*synthetic_trace(long_prompts)], rate_per_s, total_s=WHOLE_S),
        "many tenants": at_rate([*synthetic_trace(several)], rate_per_s, total_s=WHOLE_S),
        "short and long": _together(
            _part("short", _SHORT_TOKENS, rate_per_s=8.0), _part("long", _LONG_TOKENS)
        ),
        "new next to long": _together(
            _part("long", _LONG_TOKENS, rate_per_s=8.0),
            *(
                _part(f"new {start_s}", _SHORT_TOKENS, rate_per_s=8.0, start_s=start_s, num_s=5)
                for start_s in range(0, 2 * _PHASE_S, 5)
            ),
        ),
        "long, then short": _changing(_LONG_TOKENS, _SHORT_TOKENS),
        "short, then long": _changing(_SHORT_TOKENS, _LONG_TOKENS),
    }


def _changing(first_tokens: float, then_tokens: float) -> list[TraceRequest]:
    """Return requests of a tenant whose outputs change in length, next to a tenant whose outputs do
    not. Only those after the change have a deadline.
    """
    return _together(
        _part("other", first_tokens, rate_per_s=0.5, num_s=5 * _PHASE_S, deadline_s=inf),
        _part("changing", first_tokens, num_s=_PHASE_S, deadline_s=inf),
        _part(
            "changing",
            then_tokens,
            rate_per_s=8.0,
            start_s=_PHASE_S,
            num_s=4 * _PHASE_S,
            deadline_s=_CHANGED_S,
        ),
    )


def _part(
    tenant: str,
    mean_tokens: float,
    *,
    rate_per_s: float = 2.0,
    start_s: int = 0,
    num_s: int = 2 * _PHASE_S,
    deadline_s: float = _SHORT_S,
) -> list[TraceRequest]:
    """Return the requests of one tenant during `num_s` seconds."""
    config = SyntheticConfig(
        rate_per_s=rate_per_s,
        duration_s=num_s,
        mean_prompt_tokens=1000.0,
        mean_output_tokens=mean_tokens,
        output_sigma=0.3,
        seed=start_s + len(tenant),
    )
    return [
        msgspec.structs.replace(
            one, tenant=tenant, arrival_s=one.arrival_s + start_s, deadline_s=deadline_s
        )
        for one in synthetic_trace(config)
    ]


def _together(*traces: Iterable[TraceRequest]) -> list[TraceRequest]:
    return list(heapq.merge(*traces, key=attrgetter("arrival_s")))
