"""Compares the result of a simulated cluster with the targets of a plan."""

import math
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.setting import check, required, setting
from penstock.tools.simulation.cluster import ClusterRun
from penstock.tools.simulation.cluster_report import summarise_cluster
from penstock.tools.simulation.summary import has_smooth_tokens

P99 = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The targets for the requests of the trace. Raises SettingError, naming the field, if one is
    invalid.

    `ttft_p99_s`: TTFT is measured from arrival, and is infinite for a request without a token.
    `itl_p99_s`: a request with fewer than 100 gaps between tokens meets this target only if every
    gap is within it.
    """

    ttft_p99_s: float = required(
        "target",
        "p99 TTFT target, seconds: 99 % of requests have their first token in time",
        name="target_ttft_p99_s",
        above=0,
    )
    itl_p99_s: float = required(
        "target",
        "ITL target, milliseconds: 99 % of requests have 99 % of their token gaps within it",
        name="target_itl_p99_ms",
        scale=1e-3,
        above=0,
    )
    good_share: float | None = setting(
        None,
        "target",
        "share of requests that must complete within both targets, e.g. 0.99",
        name="target_good_share",
        above=0,
        at_most=1,
        shown="no target",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """The result of one simulated cluster: its main figures, and the targets that it misses.

    Attributes:
        ttft_p99_s: The nearest-rank p99 over all requests; infinite if more than 1 % got no token.
            The same holds for `ttft_p50_s` with 50 %.
        smooth_share: The share of requests with at least one token and at least 99 % of the gaps
            between their tokens within the ITL target.
        itl_p99_s: The p99 of all gaps of all requests, for comparison with benchmarks; not a
            target.
        misses: Names of the targets that are not met: "p99 TTFT", "p99 ITL", "good share".
        wall_s: How long the simulation took, seconds of real time.
    """

    num_replicas: int
    ttft_p50_s: float
    ttft_p99_s: float
    smooth_share: float
    itl_p99_s: float
    good_share: float
    goodput_per_s: float
    prefix_hit_rate: float
    kv_utilisation_max: float
    misses: tuple[str, ...]
    wall_s: float

    @property
    def meets(self) -> bool:
        """Whether all targets are met."""
        return not self.misses


def evaluate(run: ClusterRun, target: PlanTarget) -> ClusterResult:
    """Return the result of a finished run. Raises ValueError if the run counted slow gaps with an
    ITL target other than `target.itl_p99_s`.
    """
    if run.config.replica.targets.itl_s != target.itl_p99_s:
        raise ValueError("the run counted slow gaps with another target")
    table = run.total.recorder.table
    front_s = run.config.replica.front_s
    ttft_s = table.seconds("first_token_s") - table.seconds("arrival_s") + front_s
    has_token = ~np.isnan(ttft_s)
    ttft_p50_s, ttft_p99_s = (
        float(value)
        for value in np.percentile(
            np.where(has_token, ttft_s, math.inf), (50.0, 99.0), method="inverted_cdf"
        )
    )
    smooth_share = float((has_token & has_smooth_tokens(table)).mean())
    total = summarise_cluster(run).total
    misses: list[str] = []
    if not ttft_p99_s <= target.ttft_p99_s:
        misses.append("p99 TTFT")
    if smooth_share < P99:
        misses.append("p99 ITL")
    if target.good_share is not None and total.good_share < target.good_share:
        misses.append("good share")
    return ClusterResult(
        num_replicas=run.config.num_replicas,
        ttft_p50_s=ttft_p50_s,
        ttft_p99_s=ttft_p99_s,
        smooth_share=smooth_share,
        itl_p99_s=total.itl.p99_s,
        good_share=total.good_share,
        goodput_per_s=total.goodput_per_s,
        prefix_hit_rate=total.prefix_hit_rate,
        kv_utilisation_max=total.kv_utilisation_max,
        misses=tuple(misses),
        wall_s=run.total.wall_s,
    )
