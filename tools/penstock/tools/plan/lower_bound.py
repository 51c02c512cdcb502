"""Bounds on the latencies of a trace's requests that hold for any number of replicas.

Computed from the cost model, assuming that every request runs alone on an idle replica, and that
every prompt block that occurs in several requests is a cache hit.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.plan.target import P99, PlanTarget
from penstock.tools.simulation.settings import SimulationConfig

_ROUNDING = 1.0 - 1e-9
"""Factor on the bounds, so that a target equal to a bound counts as met despite rounding errors:
the simulation adds the times in another order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Lower bounds of p99 latencies, in seconds, and an upper bound of the share of good requests
    (within the TTFT and the ITL target).

    Attributes:
        itl_p99_s: The p99, over all requests, of the shortest possible gap between two tokens of a
            request. The gap counts as 0 for a request with one output token, and for a request with
            a deadline, because it may end before its first gap.
        misses: Names of the targets that cannot be met, as in `ClusterResult`.
    """

    ttft_p99_s: float
    itl_p99_s: float
    good_share: float
    misses: tuple[str, ...]


def lower_bound(
    requests: Sequence[TraceRequest], replica: SimulationConfig, target: PlanTarget
) -> LowerBound:
    """Return the bounds for `requests` (at least one) on replicas with these settings. `misses`
    compares them with `target`.
    """
    cost = replica.cost
    num_uses = Counter[int]()
    if replica.has_prefix_caching:
        num_uses.update(each for request in requests for each in request.prefix_ids)
    ttft_s = np.empty(len(requests))
    gap_s = np.zeros(len(requests))
    for i, request in enumerate(requests):
        num_prompt = request.num_prompt_tokens
        num_shared = sum(num_uses[each] > 1 for each in request.prefix_ids)
        num_cached = min(num_shared * request.prefix_block_tokens, num_prompt - 1)
        ttft_s[i] = replica.front_s + cost.step_time_s(
            num_prefill_tokens=num_prompt - num_cached,
            num_decodes=0,
            num_context_tokens=num_prompt,
        )
        # A request that is cancelled at its deadline may end before its first gap.
        if request.num_output_tokens > 1 and request.deadline_s == math.inf:
            gap_s[i] = cost.step_time_s(
                num_prefill_tokens=0, num_decodes=1, num_context_tokens=num_prompt + 1
            )
    ttft_s *= _ROUNDING
    gap_s *= _ROUNDING
    ttft_p99_s, itl_p99_s = (
        float(np.quantile(values, P99, method="inverted_cdf")) for values in (ttft_s, gap_s)
    )
    is_good = (ttft_s <= target.ttft_p99_s) & (gap_s <= target.itl_p99_s)
    good_share = float(is_good.mean())
    misses: list[str] = []
    if ttft_p99_s > target.ttft_p99_s:
        misses.append("p99 TTFT")
    if itl_p99_s > target.itl_p99_s:
        misses.append("p99 ITL")
    if target.good_share is not None and good_share < target.good_share:
        misses.append("good share")
    return LowerBound(
        ttft_p99_s=ttft_p99_s,
        itl_p99_s=itl_p99_s,
        good_share=good_share,
        misses=tuple(misses),
    )
