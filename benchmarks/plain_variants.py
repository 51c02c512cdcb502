"""Compares complex parts of the scheduler with simple variants, to show what complexity gains.

A variant replaces a class of the scheduler at run time, so the scheduler needs no option for it.

- Step fitting: least squares over the last observed steps instead of recursive least squares; and,
  by deadlines, a fixed cost model.
- Output lengths: quantiles of the last outputs, of all requests or of the tenant, instead of
  hazards by tenant and limit; and no exploration (`plain_variants_deadlines.py`).
- Sums over the waiting requests: computed again for each forecast, instead of kept up to date.
- Damping: a limit may rise at any time, instead of only after a wait that grows with each rise that
  had to be reversed.
- Pauses: no decode is left out of a step that computes a prompt of a tenant under its share.
- Eviction: a block's value is a fixed formula, its uses less its age, instead of learned from hits.
  The scheduler's own LRU order (`lru`) is measured too. All are compared on synthetic traffic and
  on a trace with LRU and Belady's rule under ideal conditions (`optimal_cache.py`).

Wait attribution has no variant, because it is already simple.
"""

import dataclasses
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cached_traffic import cached_traffic
from latency_run import direction_changes, run_machine
from optimal_cache import least_recent_hit_rate, optimal_hit_rate
from penstock.scheduler import (
    completion,
    engine,
    hit_density,
    latency_target,
    planner,
    step_sizing,
)
from penstock.scheduler.config import EvictionPolicy, SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.decode_pauses import DecodePauses
from penstock.scheduler.forecast import QueuedAhead
from penstock.scheduler.hit_density import NUM_BINS, HitDensity, bin_of
from penstock.scheduler.latency_target import Probes
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.output_lengths import Exploration, OutputLengths
from penstock.scheduler.request import Request, RequestSpec
from penstock.scheduler.running import DecodeRoster
from penstock.scheduler.step_fit import StepFit
from penstock.scheduler.use_history import MAX_USES
from penstock.scheduler.waiting_sums import WaitingSums
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import Summary, summarise
from penstock.tools.simulation.synthetic import synthetic_trace
from penstock.tools.simulation.trace_files import read_trace
from penstock.tools.simulation.transform import TransformConfig, transformed
from penstock.tools.targets import Targets
from plain_variants_deadlines import (
    WHOLE_S,
    DeadlineRow,
    FixedFit,
    LastLengths,
    NoExploration,
    NoNewTenants,
    NoUnlikely,
    OneGroup,
    OwnLastLengths,
    ShortMemory,
    at_rate,
    length_traffic,
    on_machine,
    outcomes,
    without_predictions,
)
from policies import CAPACITY_PER_S, COSTS, SYNTHETIC
from policy_sections import (
    FAIR,
    FLOOD,
    PENSTOCK,
    QUIET,
    Bench,
    of_tenant,
    quiet_tenant,
    quiet_with_flood,
)
from policy_sweep import Trial
from report import Check, Outcome, arguments, at_least, at_most, print_rows, progress, run_parts
from scheduler_step import Requests
from simulated_machines import MACHINES, Machine, step_time_of

_RIDGE = 1e-3
_NUM_WAITING = (1000, 10_000)
_CACHE_TOKENS = (1_000_000, 2_000_000)
"""Sizes of the cache for the trace, tokens."""
_SYNTHETIC_CASES = (
    ("conversations", 500_000),
    ("conversations", 1_000_000),
    ("system prompts", 500_000),
    ("documents", 500_000),
)
_SYNTHETIC_REQUESTS = (3000, 10_000)
"""Numbers of synthetic requests in the quick run and in the full run."""
_SYNTHETIC_RATE_PER_S = 5.0
_BLOCK_SIZE = 32
_QUICK_END_S = 600.0
_LOAD = 0.3
_POOLS_TO_HALF = 64
"""The half-life of hit counts, in pools."""
_FLOOD_END_S = 300.0
"""Where the trace is cut off for the comparisons of pauses and of deadlines."""
_LATE_LOAD = 1.2
"""Load of the comparisons of deadlines, as a multiple of the capacity."""
_SERVER = SimulationConfig(
    targets=Targets(ttft_s=1.0, itl_s=0.1), num_blocks=16_384, batch_size=128, max_tokens=2048
)
"""The server of the comparisons of pauses and of deadlines, as by default in `policies.py`."""
_H200_COST = COSTS["h200-8b"]
_FITTED_MACHINES = {
    **{
        machine: COSTS["default"]
        for machine in MACHINES
        if machine.name in {"noisy", "convex", "slower", "erratic"}
    },
    Machine(name="h200-8b", true_s=step_time_of(_H200_COST)): _H200_COST,
}
"""The machines of the comparison of deadlines, and their cost models as known before the run; the
fit starts with the default one.
"""
_MIN_PREFILL_RATIO = 0.985
"""Minimum prefill rate relative to the variant; a smaller loss is irrelevant."""
_MAX_LOSS_POINTS = 1.0
"""A smaller difference of prefix hits, in % of prompt tokens, is irrelevant."""


class WindowFit(StepFit):
    """Least squares over the last `num_kept` observed steps.

    Uses relative residuals as in `StepFit`, one Huber pass, and a small ridge penalty towards the
    previous coefficients; a coefficient that would be negative is 0. The weight of a step is
    `decay` to the power of the number of later steps.
    """

    num_kept = 128
    decay = 1.0

    def _learn(
        self, features: list[float], residual: float, limit: float, memory_steps: float
    ) -> None:
        del memory_steps
        if not hasattr(self, "_window"):
            self._window: deque[list[float]] = deque(maxlen=self.num_kept)
        # Relative to the prediction.
        self._window.append([*features, 1.0 + residual])
        rows: NDArray[np.float64] = np.array(self._window)
        weights = self.decay ** np.arange(len(rows) - 1, -1, -1, dtype=np.float64)
        scales: NDArray[np.float64] = np.array(self._scales)
        values = _least_squares(rows, weights, np.array(self._coefficients) / scales)
        errors = np.abs(rows[:, -1] - rows[:, :-1] @ values)
        weights *= limit / np.maximum(limit, errors)
        self._coefficients = (_least_squares(rows, weights, values) * scales).tolist()

    def _affects_all_steps(self, factor: float) -> bool:
        """Return False, so that no coefficient is rescaled: the window drops old steps anyway."""
        del factor
        return False


def _least_squares(
    rows: NDArray[np.float64], weights: NDArray[np.float64], last: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the coefficients [4] of a fit, none of them negative. `rows` [n, 5]: four features and
    the target; `weights` [n]; `last` [4]: the previous coefficients.
    """
    is_used = np.ones(last.shape, dtype=np.bool_)
    values = np.zeros_like(last)
    while is_used.any():
        features = rows[:, :-1][:, is_used]
        matrix = (features * weights[:, None]).T @ features + _RIDGE * np.eye(features.shape[1])
        right = (features * weights[:, None]).T @ rows[:, -1] + _RIDGE * last[is_used]
        values = np.zeros_like(last)
        values[is_used] = np.linalg.solve(matrix, right)
        if values.min() >= 0.0:
            break
        is_used &= values > 0.0
    return values


class UndampedProbes(Probes):
    """Allows every increase of a limit immediately, without the wait of `Probes` after an increase
    that had to be reversed."""

    def may_rise(self, level: int) -> bool:
        """Return True: nothing is damped."""
        del level
        return True


class NoPauses(DecodePauses):
    """Runs every decode in every step."""

    def pause(
        self, under_share: Sequence[Request], chunks: Sequence[PrefillChunk], roster: DecodeRoster
    ) -> bool:
        """Return False: nothing is paused."""
        del under_share, chunks, roster
        return False


class ColumnSums(WaitingSums):
    """Computes the sums over the waiting requests again for each forecast, from NumPy columns."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        # Priority, tenant, deadline bucket; requests, prefill tokens, blocks, output tokens.
        self._columns: NDArray[np.int64] = np.zeros((1024, 7), dtype=np.int64)
        self._keys: list[int] = []
        self._place_of: dict[int, int] = {}
        self._tenants: dict[str, int] = {}

    def add(self, request: Request, due_s: float) -> None:
        """Add a request that may now be admitted; `due_s`: its earliest deadline or time limit."""
        place, spec = len(self._keys), request.spec
        if place == len(self._columns):
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)))
        self._columns[place] = (
            spec.priority,
            self._tenants.setdefault(spec.tenant, len(self._tenants)),
            self._bucket(request, due_s),
            1,
            request.num_uncached_tokens,
            request.num_blocks,
            request.num_expected_tokens,
        )
        self._keys.append(spec.key)
        self._place_of[spec.key] = place

    def remove(self, request: Request) -> None:
        """Remove a request that leaves the queue; a no-op if it is not in the sums."""
        place = self._place_of.pop(request.spec.key, None)
        if place is None:
            return
        last = self._keys.pop()
        if place < len(self._keys):
            self._columns[place] = self._columns[len(self._keys)]
            self._keys[place] = last
            self._place_of[last] = place

    def ahead_of(
        self, request: Request, due_s: float, num_prefill: int, *, is_under_share: bool = False
    ) -> QueuedAhead:
        """Return the number of requests likely to go before one that is not in the sums yet, and
        their total prefill tokens, blocks and output tokens.
        """
        rows, spec = self._columns[: len(self._keys)], request.spec
        tenant = self._tenants.get(spec.tenant, -1)
        is_mine = rows[:, 0] == spec.priority
        is_own = is_mine & (rows[:, 1] == tenant) & (rows[:, 2] <= self._bucket(request, due_s))
        own = rows[is_own, 3:].sum(axis=0)
        total = rows[rows[:, 0] > spec.priority, 3:].sum(axis=0) + own
        others = rows[is_mine & (rows[:, 1] != tenant)]
        num_others = int(others[:, 4].sum())
        if num_others and not is_under_share:
            names = list(self._tenants)
            weight = sum(self._weight_of(names[number]) for number in np.unique(others[:, 1]))
            served = (int(own[1]) + num_prefill) * weight / self._weight_of(spec.tenant)
            times = min(1.0, served / num_others)
            share = times * others[:, 3:].sum(axis=0)
            total = total + np.array([np.ceil(share[0]), *share[1:]], dtype=np.int64)
        num_requests, num_prefill_tokens, num_blocks, num_output_tokens = total.tolist()
        return QueuedAhead(
            num_requests=num_requests,
            num_prefill_tokens=num_prefill_tokens,
            num_blocks=num_blocks,
            num_output_tokens=num_output_tokens,
        )


class AgedUses(HitDensity):
    """Values a block by a fixed formula: its number of uses minus its age (least frequently used,
    with ageing).

    Uses before the block was last evicted count too, up to `max_uses` in all. Age is counted in
    released blocks; `pools_per_use` times the size of the pool offsets one use.
    """

    pools_per_use = 1.0
    max_uses = MAX_USES

    def __init__(self, num_classes: int, half_life: int) -> None:
        super().__init__(num_classes, half_life)
        age_of_use = self.pools_per_use * half_life / _POOLS_TO_HALF
        starts = [0.0] * NUM_BINS
        for octave in range(1, 28):
            for age in (2 << octave, 3 << octave):
                starts[bin_of(age)] = age / age_of_use
        self.table = [
            [min(kind, self.max_uses) - start for start in starts] for kind in range(num_classes)
        ]

    def refit(self) -> None:
        """Do nothing: the values are fixed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
    """A replacement of the class `name` of `module`: a subclass of `base` with `attributes`."""

    module: ModuleType
    name: str
    base: type
    attributes: dict[str, float]


VARIANTS = {
    "window-64": _Variant(step_sizing, "StepFit", WindowFit, {"num_kept": 64}),
    "window-128": _Variant(step_sizing, "StepFit", WindowFit, {"num_kept": 128}),
    "window-256": _Variant(step_sizing, "StepFit", WindowFit, {"num_kept": 256, "decay": 0.98}),
    "fixed cost": _Variant(step_sizing, "StepFit", FixedFit, {}),
    "no new tenants": _Variant(completion, "Exploration", NoNewTenants, {}),
    "no unlikely": _Variant(completion, "Exploration", NoUnlikely, {}),
    "no exploration": _Variant(completion, "Exploration", NoExploration, {}),
    "one group": _Variant(completion, "OutputLengths", OneGroup, {}),
    "memory 64": _Variant(completion, "OutputLengths", ShortMemory, {}),
    "last-256": _Variant(completion, "OutputLengths", LastLengths, {"num_kept": 256}),
    "own last-64": _Variant(completion, "OutputLengths", OwnLastLengths, {"num_kept": 64}),
    "own last-256": _Variant(completion, "OutputLengths", OwnLastLengths, {"num_kept": 256}),
    "own endless-256": _Variant(
        completion, "OutputLengths", OwnLastLengths, {"is_cut_endless": True}
    ),
    "column-sums": _Variant(engine, "WaitingSums", ColumnSums, {}),
    "undamped": _Variant(latency_target, "Probes", UndampedProbes, {}),
    "no pauses": _Variant(planner, "DecodePauses", NoPauses, {}),
    "aged-uses-2": _Variant(hit_density, "HitDensity", AgedUses, {"pools_per_use": 2.0}),
    "reused-1": _Variant(
        hit_density, "HitDensity", AgedUses, {"pools_per_use": 1.0, "max_uses": 2}
    ),
    "reused-last": _Variant(
        hit_density, "HitDensity", AgedUses, {"pools_per_use": 1e6, "max_uses": 2}
    ),
}
_PAUSES, _NO_PAUSES = "pauses", "no pauses"
_RECURSIVE, _UNDAMPED, _LEARNED, _LRU = "recursive", "undamped", "hit density", "lru"
_WINDOWS = tuple(name for name in VARIANTS if name.startswith("window"))
_STEP_VARIANTS = (*_WINDOWS, _UNDAMPED)
_FIXED, _HAZARDS = "fixed cost", "hazards, explored"
_LENGTH_VARIANTS = tuple(name for name in VARIANTS if VARIANTS[name].module is completion)
_SUMS = {"running sums": WaitingSums, "column-sums": ColumnSums}
_ORDERS = (_LEARNED, _LRU, *(name for name in VARIANTS if VARIANTS[name].base is AgedUses))


def use(variant: str | None) -> None:
    """Restore the scheduler's classes in this process; then, unless `variant` is None, replace one
    of them by it.
    """
    setattr(step_sizing, "StepFit", StepFit)  # noqa: B010
    setattr(latency_target, "Probes", Probes)  # noqa: B010
    setattr(engine, "WaitingSums", WaitingSums)  # noqa: B010
    setattr(planner, "DecodePauses", DecodePauses)  # noqa: B010
    setattr(hit_density, "HitDensity", HitDensity)  # noqa: B010
    setattr(completion, "Exploration", Exploration)  # noqa: B010
    setattr(completion, "OutputLengths", OutputLengths)  # noqa: B010
    if variant is not None:
        chosen = VARIANTS[variant]
        replacement = type(chosen.base.__name__, (chosen.base,), chosen.attributes)
        setattr(chosen.module, chosen.name, replacement)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """The results of one machine with one fit: prefill tokens per second, p99 ITL divided by the
    target, and direction changes of the step budget.
    """

    machine: str
    fit: str
    prefill_per_s: float
    p99_ratio: float
    num_turns: int


def fit_row(machine: Machine, fit: str, duration_s: float) -> FitRow:
    """Run a machine with the scheduler's classes, or with the variant `fit`; return the results."""
    use(None if fit == _RECURSIVE else fit)
    run = run_machine(machine, SchedulerConfig(target_itl_s=machine.target_s), duration_s)
    return FitRow(
        machine=machine.name,
        fit=fit,
        prefill_per_s=run.prefill_per_s,
        p99_ratio=run.itl_percentile_s(99.0) / machine.target_s,
        num_turns=sum(direction_changes(run.budget[run.within(*span)]) for span in machine.steady),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumsRow:
    """The median time, microseconds, that one implementation of the sums (`kind`) takes for an
    arrival while `num_waiting` requests wait.
    """

    num_waiting: int
    kind: str
    arrival_us: float


def sums_row(num_waiting: int, kind: str) -> SumsRow:
    """Measure forecast, addition and removal of a new request while `num_waiting` requests wait;
    return the median time of all three together.
    """
    sums = _SUMS[kind](SchedulerConfig())
    requests = Requests(seed=1)
    waiting = [_waiting(requests.make_any(), number) for number in range(num_waiting + 1000)]
    for request in waiting[:num_waiting]:
        sums.add(request, request.spec.deadline_s)
    times_us: list[float] = []
    for request in waiting[num_waiting:]:
        start_ns = time.perf_counter_ns()
        sums.ahead_of(request, request.spec.deadline_s, request.num_uncached_tokens)
        sums.add(request, request.spec.deadline_s)
        sums.remove(request)
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return SumsRow(num_waiting=num_waiting, kind=kind, arrival_us=float(np.median(times_us)))


def _waiting(spec: RequestSpec, sequence: int) -> Request:
    num_tokens = len(spec.prompt_ids)
    return Request(
        spec=spec,
        sequence=sequence,
        tokens=spec.prompt_ids,
        block_hashes=[],
        num_uncached_tokens=num_tokens,
        num_blocks=-(-num_tokens // _BLOCK_SIZE),
        num_expected_tokens=spec.max_tokens,
    )


def hit_percent(
    name: str, traffic: Sequence[TraceRequest], num_cache_tokens: int, order: str
) -> float:
    """Run the engine on some traffic with an eviction order of the scheduler or a variant; return
    prefix hits in % of all prompt tokens.
    """
    use(order if order in VARIANTS else None)
    policy = EvictionPolicy.LRU if order == _LRU else EvictionPolicy.HIT_DENSITY
    base = SimulationConfig(
        num_blocks=num_cache_tokens // _BLOCK_SIZE, block_size=_BLOCK_SIZE, max_tokens=2048
    )
    scheduler = dataclasses.replace(base.scheduler, eviction=policy)
    summary = summarise(simulate(traffic, dataclasses.replace(base, scheduler=scheduler)))
    progress(f"{name}, {num_cache_tokens:,} tokens, {order}: {summary.prefix_hit_rate:.2%}")
    return 100 * summary.prefix_hit_rate


def steps(options: Namespace) -> Outcome:
    """Compare step fitting and damping on the simulated machines."""
    machines = [one for one in MACHINES if not options.machine or one.name in options.machine]
    rows = [
        fit_row(machine, fit, options.duration_s)
        for machine in machines
        for fit in (_RECURSIVE, *_STEP_VARIANTS)
    ]
    print_rows(f"Step fitting and damping, {options.duration_s:.0f} virtual seconds", rows)
    recursive = [row for row in rows if row.fit == _RECURSIVE]
    checks: list[Check] = []
    for fit in _STEP_VARIANTS:
        its = [row for row in rows if row.fit == fit]
        pairs = zip(recursive, its, strict=True)
        least = min(one.prefill_per_s / other.prefill_per_s for one, other in pairs)
        num_turns = sum(row.num_turns for row in recursive)
        checks += [
            at_least(f"prefill over {fit}, worst machine", least, _MIN_PREFILL_RATIO, "times"),
            at_most(f"budget changes against {fit}", num_turns, sum(row.num_turns for row in its)),
        ]
    return rows, checks


def sums(_: Namespace) -> Outcome:
    """Compare the time that `WaitingSums` and `ColumnSums` take for an arrival."""
    rows = [sums_row(num_waiting, kind) for num_waiting in _NUM_WAITING for kind in _SUMS]
    print_rows("An arrival, median microseconds: forecast, add, remove", rows)
    return rows, []


def lengths(options: Namespace) -> Outcome:
    """Compare output lengths and their exploration with plain variants, by deadlines of whole
    outputs.
    """
    cases = length_traffic(_LATE_LOAD * CAPACITY_PER_S["long-prompts"])
    if options.trace is not None:
        rate_per_s = _LATE_LOAD * options.capacity_per_s
        cases = {"trace": at_rate(_start_of(options.trace), rate_per_s, total_s=WHOLE_S)}
    rows = [
        row
        for name, requests in cases.items()
        for row in deadline_rows(name, requests, (_HAZARDS, *_LENGTH_VARIANTS))
    ]
    print_rows("Output lengths: deadlines of whole outputs", rows)
    return rows, _deadline_checks(rows, _HAZARDS)


def fit_deadlines(options: Namespace) -> Outcome:
    """Compare step fitting with plain variants on simulated machines, by deadlines of the first
    token and of whole outputs.
    """
    trace, rate_per_s = (
        list(synthetic_trace(SYNTHETIC["long-prompts"])),
        _LATE_LOAD * CAPACITY_PER_S["long-prompts"],
    )
    if options.trace is not None:
        trace, rate_per_s = _start_of(options.trace), _LATE_LOAD * options.capacity_per_s
    cases = {
        "first token": at_rate(trace, rate_per_s, ttft_s=_SERVER.targets.ttft_s),
        "whole": at_rate(trace, rate_per_s, total_s=WHOLE_S),
    }
    rows: list[DeadlineRow] = []
    for machine, cost in _FITTED_MACHINES.items():
        if options.machine and machine.name not in options.machine:
            continue
        for name, requests in cases.items():
            with on_machine(machine, requests[-1].arrival_s):
                fits = (_RECURSIVE, *_WINDOWS, _FIXED)
                rows += deadline_rows(f"{machine.name}, {name}", requests, fits, cost)
    print_rows("Step fitting: deadlines", rows)
    return rows, _deadline_checks(rows, _RECURSIVE)


def deadline_rows(
    name: str,
    requests: Sequence[TraceRequest],
    variants: Sequence[str],
    cost: CostModel | None = None,
) -> list[DeadlineRow]:
    """Run the requests with each variant, or with the scheduler's classes for a name that is not in
    `VARIANTS`. `cost`: the cost model of the variant with a fixed one.
    """
    config = PENSTOCK.config(_SERVER)
    known = dataclasses.replace(config.scheduler, known_cost=cost)
    use(None)
    unpredicted = outcomes(requests, without_predictions(config))
    rows: list[DeadlineRow] = []
    for variant in variants:
        use(variant if variant in VARIANTS else None)
        is_fixed = variant == _FIXED
        run = dataclasses.replace(config, scheduler=known) if is_fixed else config
        rows.append(outcomes(requests, run).row(name, variant, unpredicted))
        progress(str(rows[-1]))
    return rows


def _deadline_checks(rows: Sequence[DeadlineRow], chosen: str) -> list[Check]:
    """Compare the requests in time of the variant `chosen` with those of each other one."""
    in_time = {(row.traffic, row.variant): row.in_time_percent for row in rows}
    checks: list[Check] = []
    for variant in dict.fromkeys(row.variant for row in rows if row.variant != chosen):
        gains = [
            in_time[traffic, chosen] - percent
            for (traffic, other), percent in in_time.items()
            if other == variant
        ]
        name = f"in time with {chosen} less with {variant}"
        checks += [
            at_least(f"{name}, worst case", min(gains), -_MAX_LOSS_POINTS, "points"),
            at_least(f"{name}, best case", max(gains), _MAX_LOSS_POINTS, "points"),
        ]
    return checks


def _start_of(path: Path) -> list[TraceRequest]:
    """Return the requests of the first minutes of a trace file."""
    return list(transformed(read_trace(path), TransformConfig(end_s=_FLOOD_END_S)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PausesRow:
    """A low-rate tenant next to a flood, with or without pauses: its TTFT, in seconds and over that
    alone; p99 ITL of all tenants; shares of good requests; good requests per second.
    """

    traffic: str
    policy: str
    variant: str
    ttft_p50_s: float
    ttft_p99_s: float
    times_alone: float
    itl_p99_ms: float
    quiet_good_percent: float
    flood_good_percent: float
    good_per_s: float
    tokens_per_s: float


def pauses_rows(name: str, trace: Sequence[TraceRequest], capacity_per_s: float) -> list[PausesRow]:
    """Run a low-rate tenant next to a flood of ten times the capacity (`neighbour` of
    `policies.py`) with and without pauses, with deadlines and an ITL target (`penstock`) and
    without (`fair`). `capacity_per_s`: requests per second, as printed by `policies.py`.
    """

    def summary(trial: Trial) -> Summary:
        requests = transformed(trial.traffic(trace), trial.transform)
        return summarise(simulate(requests, trial.config))

    span_s = trace[-1].arrival_s - trace[0].arrival_s
    bench = Bench(base=_SERVER, capacity=capacity_per_s * span_s / len(trace))
    rows: list[PausesRow] = []
    for contender in (PENSTOCK, FAIR):
        use(None)
        # One tenant alone never pauses.
        alone = of_tenant(summary(bench.trial(contender, 1.0, traffic=quiet_tenant)), QUIET)
        for variant in (_PAUSES, _NO_PAUSES):
            use(None if variant == _PAUSES else variant)
            both = summary(bench.trial(contender, 1.0, traffic=quiet_with_flood))
            quiet, flood = of_tenant(both, QUIET), of_tenant(both, FLOOD)
            row = PausesRow(
                traffic=name,
                policy=contender.name,
                variant=variant,
                ttft_p50_s=quiet["ttft"]["p50_s"],
                ttft_p99_s=quiet["ttft_p99_of_all_s"],
                times_alone=quiet["ttft_p99_of_all_s"] / alone["ttft_p99_of_all_s"],
                itl_p99_ms=1e3 * both.itl.p99_s,
                quiet_good_percent=100 * quiet["good_share"],
                flood_good_percent=100 * flood["good_share"],
                good_per_s=both.goodput_per_s,
                tokens_per_s=both.output_tokens_per_s,
            )
            progress(str(row))
            rows.append(row)
    return rows


def pauses(options: Namespace) -> Outcome:
    """Compare pauses of decodes with a planner without pauses."""
    kinds = SYNTHETIC if options.full else ("long-prompts", "short-prompts")
    traffic = [
        (kind, list(synthetic_trace(SYNTHETIC[kind])), CAPACITY_PER_S[kind]) for kind in kinds
    ]
    if options.trace is not None:
        traffic = [("trace", _start_of(options.trace), options.capacity_per_s)]
    rows = [row for case in traffic for row in pauses_rows(*case)]
    print_rows("Pauses of decodes: a quiet tenant beside a flood", rows)
    checks: list[Check] = []
    for row, plain in zip(rows[::2], rows[1::2], strict=True):
        case = f"{row.traffic}, {row.policy}"
        ratio = row.ttft_p99_s / plain.ttft_p99_s
        checks += [
            at_most(f"p99 TTFT of the quiet tenant over no pauses, {case}", ratio, 1.0, "times"),
            at_least(f"good/s over no pauses, {case}", row.good_per_s / plain.good_per_s, 1.0),
        ]
    return rows, checks


def eviction(options: Namespace) -> Outcome:
    """Compare eviction orders on synthetic traffic, and on a trace if one is given."""
    num_requests = _SYNTHETIC_REQUESTS[options.full]
    cases = [
        (kind, cached_traffic(kind, num_requests, _SYNTHETIC_RATE_PER_S), num_tokens)
        for kind, num_tokens in _SYNTHETIC_CASES
    ]
    if options.trace is not None:
        end_s = TransformConfig().end_s if options.full else _QUICK_END_S
        config = TransformConfig(end_s=end_s, load=_LOAD)
        trace = list(transformed(read_trace(options.trace), config))
        cases += [("trace", trace, num_tokens) for num_tokens in _CACHE_TOKENS]

    def ideal(rate: Callable[..., float], traffic: Sequence[TraceRequest], size: int) -> float:
        return 100 * rate(traffic, num_cache_tokens=size, block_size=_BLOCK_SIZE)

    rows: list[dict[str, Any]] = [
        {"traffic": name, "requests": len(traffic), "tokens of cache": size}
        | {order: hit_percent(name, traffic, size, order) for order in _ORDERS}
        | {
            "ideal LRU": ideal(least_recent_hit_rate, traffic, size),
            "Belady": ideal(optimal_hit_rate, traffic, size),
        }
        for name, traffic, size in cases
    ]
    print_rows("Eviction: prefix hits, % of prompt tokens", rows)
    checks: list[Check] = []
    for order in _ORDERS[1:]:
        gains = [row[_LEARNED] - row[order] for row in rows]
        name = f"prefix hits of hit density less those of {order}"
        checks += [
            at_least(f"{name}, worst case", min(gains), -_MAX_LOSS_POINTS, "points"),
            at_least(f"{name}, best case", max(gains), _MAX_LOSS_POINTS, "points"),
        ]
    return rows, checks


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="for all parts but steps and sums (eviction: with prefix ids)",
    )
    parser.add_argument(
        "--capacity-per-s",
        type=float,
        default=20.5,
        help="for pauses and deadlines: requests per second of the trace at load 1 of policies.py",
    )
    parser.add_argument("--duration-s", type=float, default=60.0, help="of each machine, virtual")
    names = [machine.name for machine in MACHINES]
    parser.add_argument("--machine", action="append", choices=names, help="only this machine")
    parts = {
        "steps": steps,
        "deadlines": fit_deadlines,
        "lengths": lengths,
        "sums": sums,
        "pauses": pauses,
        "eviction": eviction,
    }
    run_parts(parser, parts)


if __name__ == "__main__":
    main()
