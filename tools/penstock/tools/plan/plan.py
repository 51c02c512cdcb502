"""Finds the replica settings and the number of replicas that serve a trace within its targets.

Chooses and runs the simulations, and chooses the best candidate.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec

from penstock.scheduler.setting import check, setting
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.plan.candidates import Candidate
from penstock.tools.plan.lower_bound import LowerBound, lower_bound
from penstock.tools.plan.target import ClusterResult, PlanTarget, evaluate
from penstock.tools.plan.window import PlanWindow
from penstock.tools.simulation.cluster import MAX_REPLICAS, ClusterConfig, simulate_cluster
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.simulate import SimulationProgress
from penstock.tools.targets import Targets

CURVE_LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Loads of the points of a load curve, as multiples of the load that one replica has in the
plan.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The window to plan for, the maximum number of replicas, and the requests per point of the
    load curve. Raises SettingError, naming the field, if one is invalid.
    """

    window_s: float = setting(
        600.0,
        "target",
        "plan for the busiest window of this many seconds, after --load; inf: the whole trace",
        above=0,
        may_be_infinite=True,
    )
    max_replicas: int = setting(
        64, "target", "maximum number of replicas to try", at_least=1, at_most=MAX_REPLICAS
    )
    num_curve_requests: int = setting(
        2000,
        "curve",
        "requests per point of the load curve of one replica; 0: no curve",
        name="curve_requests",
        at_least=0,
    )

    def __post_init__(self) -> None:
        check(self)


OnProgress: TypeAlias = Callable[[str, SimulationProgress], None]
"""Called with the display name and the progress of a running simulation; see
`simulate_cluster`.
"""
OnTried: TypeAlias = Callable[[str, ClusterResult], None]
"""Called when a simulation has ended, with its display name and its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """The result of a single replica at a load of `offered_per_s` requests per second."""

    offered_per_s: float
    result: ClusterResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """The plan for one candidate.

    Attributes:
        num_replicas: The number of replicas that met the target while one replica fewer did not (0
            replicas count as failed); None: the target was not met.
        tried: The results of all simulated clusters, in order of the number of replicas.
        curve: The load curve: a single replica at increasing loads; may be empty.
        is_monotone: Whether, among the numbers tried, no larger one failed while a smaller one met
            the target.
    """

    candidate: Candidate
    num_replicas: int | None
    tried: tuple[ClusterResult, ...]
    curve: tuple[LoadPoint, ...]
    is_monotone: bool

    @property
    def price(self) -> float | None:
        """Price of all replicas; None: no number met the target, or the price is unknown."""
        if self.num_replicas is None or self.candidate.price is None:
            return None
        return self.num_replicas * self.candidate.price

    @property
    def result(self) -> ClusterResult:
        """The result of `num_replicas` replicas, or of the largest number tried if `num_replicas`
        is None.
        """
        chosen = self.num_replicas
        return next((v for v in self.tried if v.num_replicas == chosen), self.tried[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpossibleCandidate:
    """A candidate that was not simulated, because its bounds show that no number of replicas meets
    the target.
    """

    candidate: Candidate
    bound: LowerBound


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of a capacity plan. `candidates`: the results of the candidates that were
    simulated; `impossible`: the other candidates.

    `best` is the cheapest candidate that meets the target with at most `max_replicas` replicas;
    without prices, the candidate with the fewest replicas; among equal candidates, the first. None
    if no candidate meets the target.
    """

    target: PlanTarget
    window: PlanWindow
    max_replicas: int
    num_curve_requests: int
    candidates: tuple[CandidatePlan, ...]
    impossible: tuple[ImpossibleCandidate, ...]
    best: CandidatePlan | None


def make_plan(
    window: PlanWindow,
    candidates: Sequence[Candidate],
    target: PlanTarget,
    search: PlanSearch,
    on_progress: OnProgress = lambda _what, _progress: None,
    on_tried: OnTried = lambda _what, _result: None,
) -> Plan:
    """Search the number of replicas for each candidate, and return the plan.

    A candidate whose bounds miss the target (see `lower_bound`) is not simulated.
    """
    max_replicas, num_curve_requests = search.max_replicas, search.num_curve_requests
    bounds = [lower_bound(window.requests, each.replica, target) for each in candidates]
    plans = tuple(
        _CandidatePlanner(window, candidate, target, on_progress, on_tried).plan(
            max_replicas, num_curve_requests
        )
        for candidate, bound in zip(candidates, bounds, strict=True)
        if not bound.misses
    )
    serving = [plan for plan in plans if plan.num_replicas is not None]
    return Plan(
        target=target,
        window=window,
        max_replicas=max_replicas,
        num_curve_requests=min(num_curve_requests, len(window.requests)),
        candidates=plans,
        impossible=tuple(
            ImpossibleCandidate(candidate=candidate, bound=bound)
            for candidate, bound in zip(candidates, bounds, strict=True)
            if bound.misses
        ),
        best=min(serving, key=_cost, default=None),
    )


def guessed_replicas(window: PlanWindow, config: SimulationConfig) -> int:
    """Return the number of replicas at which a search begins: the compute time of all tokens,
    assuming no cache hits and full batches, divided by the window's duration and rounded up.
    """
    cost = config.cost
    work_s = 0.0
    for request in window.requests:
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        decode_s = cost.step_s / config.max_num_seqs + cost.decode_slot_s
        decode_s += cost.context_token_s * (num_prompt + num_output / 2.0)
        work_s += cost.prefill_token_s * num_prompt + decode_s * num_output
    return max(1, math.ceil(work_s / (window.end_s - window.start_s)))


class _CandidatePlanner:
    """Plans one candidate; keeps the result of each number of replicas, so that none is simulated
    twice.
    """

    def __init__(
        self,
        window: PlanWindow,
        candidate: Candidate,
        target: PlanTarget,
        on_progress: OnProgress,
        on_tried: OnTried,
    ) -> None:
        targets = Targets(ttft_s=target.ttft_p99_s, itl_s=target.itl_p99_s)
        self._replica = dataclasses.replace(candidate.replica, targets=targets)
        self._window = window
        self._candidate = candidate
        self._target = target
        self._on_progress, self._on_tried = on_progress, on_tried
        self._tried: dict[int, ClusterResult] = {}

    def plan(self, max_replicas: int, num_curve_requests: int) -> CandidatePlan:
        least = least_replicas(
            lambda num: self._result(num).meets,
            first_guess=guessed_replicas(self._window, self._replica),
            max_replicas=max_replicas,
        )
        if least is not None and least < max_replicas:
            # The report recommends a spare replica, so that number is simulated too.
            self._result(least + 1)
        tried = tuple(self._tried[num] for num in sorted(self._tried))
        holds = [result.meets for result in tried]
        return CandidatePlan(
            candidate=self._candidate,
            num_replicas=least,
            tried=tried,
            curve=self._curve(least or max_replicas, num_curve_requests),
            is_monotone=holds == sorted(holds),
        )

    def _result(self, num_replicas: int) -> ClusterResult:
        known = self._tried.get(num_replicas)
        if known is None:
            noun = "replica" if num_replicas == 1 else "replicas"
            what = f"{self._candidate.name}, {num_replicas} {noun}"
            known = self._judged(what, self._window.requests, num_replicas)
            self._tried[num_replicas] = known
        return known

    def _curve(self, num_replicas: int, num_requests: int) -> tuple[LoadPoint, ...]:
        """Simulate one replica at multiples of the load that it has in a cluster of `num_replicas`,
        with the first `num_requests` requests of the window. Return the points of this load curve.

        Empty if `num_requests` is 0, or these requests all arrive at the same time.
        """
        requests = self._window.requests[:num_requests]
        span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
        if span_s <= 0.0:
            return ()
        own_per_s = len(requests) / span_s
        points: list[LoadPoint] = []
        for load in CURVE_LOADS:
            offered_per_s = load * self._window.requests_per_s / num_replicas
            factor = offered_per_s / own_per_s
            moved = [msgspec.structs.replace(r, arrival_s=r.arrival_s / factor) for r in requests]
            what = f"{self._candidate.name}, one replica at {offered_per_s:.2f} requests/s"
            result = self._judged(what, moved, 1)
            points.append(LoadPoint(offered_per_s=offered_per_s, result=result))
        return tuple(points)

    def _judged(
        self, what: str, requests: Sequence[TraceRequest], num_replicas: int
    ) -> ClusterResult:
        config = ClusterConfig(
            replica=self._replica, num_replicas=num_replicas, routing=self._candidate.routing
        )
        run = simulate_cluster(requests, config, partial(self._on_progress, what))
        result = evaluate(run, self._target)
        self._on_tried(what, result)
        return result


def _cost(plan: CandidatePlan) -> float:
    if plan.price is not None:
        return plan.price
    return float(plan.num_replicas or math.inf)


def least_replicas(
    meets: Callable[[int], bool], *, first_guess: int, max_replicas: int
) -> int | None:
    """Return a number n <= `max_replicas` such that `meets(n)` is true and `meets(n - 1)` false;
    None if no number that was tried, `max_replicas` included, meets the target.

    `meets(0)` is taken as false and not called. From `first_guess`, the search goes up or down in
    doubling steps, then bisects the remaining interval (galloping, as in Bentley and Yao, "An
    Almost Optimal Algorithm for Unbounded Searching", 1976). No number is tried twice, and n - 1
    has been tried if it is not 0. If more replicas can be worse, a smaller number than n may also
    meet the target. Raises ValueError if `max_replicas` is less than 1.
    """
    if max_replicas < 1:
        raise ValueError(f"max_replicas must be at least 1, not {max_replicas}")
    low, high, step = 0, max_replicas + 1, 1
    has_held = has_failed = False
    num = min(max(first_guess, 1), max_replicas)
    while high - low > 1:
        if meets(num):
            high, has_held = num, True
        else:
            low, has_failed = num, True
        if has_held and has_failed:
            num = (low + high) // 2
        elif has_held:
            num = max(1, high - step)
        else:
            num = min(max_replicas, low + step)
        step *= 2
    return high if has_held else None
