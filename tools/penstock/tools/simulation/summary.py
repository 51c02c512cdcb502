"""Computes the figures of a run: goodput, latencies, KV cache use, fairness.

Times are virtual, so the same trace and settings give the same summary.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.tools.simulation.histogram import DurationHistogram
from penstock.tools.simulation.recorder import MemorySamples, RunRecorder
from penstock.tools.simulation.request_columns import RequestColumns
from penstock.tools.simulation.simulate import SimulationRun
from penstock.tools.targets import SLOW_GAP_SHARE, Targets

_EXPIRED = ("ttft_deadline_exceeded", "deadline_exceeded")
_UNREACHABLE = ("ttft_deadline_unreachable", "deadline_unreachable")
_REJECTED = (*_UNREACHABLE, "queue_full", "tenant_over_quota")
_COMPLETED = ("length", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Mean, percentiles and maximum of durations, in seconds; NaN if there are no values."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSummary:
    """The figures of one tenant. `num_served_tokens`: output tokens. `good_share`: share of its
    requests that were good (see `Summary.num_good`). `num_late`: requests counted in
    `Summary.num_rejected` or `num_expired`. `ttft` covers requests with a token; for
    `ttft_p99_of_all_s`, the TTFT of a request without a token is infinite.
    """

    tenant: str
    num_requests: int
    num_completed: int
    num_late: int
    num_served_tokens: int
    good_share: float
    ttft: Durations
    ttft_p99_of_all_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run.

    Attributes:
        num_rejected: Requests rejected, or dropped from the queue, because of a deadline that
            cannot be met, a full queue or a tenant's quota.
        num_expired: Requests whose deadline passed.
        duration_s: The time from the first arrival to the last end.
        num_good: Completed requests with the first token within the TTFT target and at least 99 %
            of the gaps within the ITL target.
        goodput_per_s: Good requests over the duration.
        requests_per_s: Completed requests over the duration.
        output_tokens_per_s: Output tokens of all requests over the duration.
        prompt_tokens_per_s: Prompt tokens of admitted requests, cached ones included, over the
            duration.
        itl: All gaps between tokens.
        kv_utilisation: Mean of used blocks over all blocks, weighted by time; `kv_utilisation_max`:
            the maximum of the samples.
        kv_waste: Empty token slots in used blocks over all token slots in used blocks, weighted by
            time.
        prefix_hit_rate: Prompt tokens found in the cache over prompt tokens, of admitted requests.
        prefill_waste: Prefill tokens computed for requests that later passed a deadline or were
            dropped because of one, over all prefill tokens computed.
        served_ratio: How unequally tenants were served; see the function `served_ratio`.
    """

    num_requests: int
    num_completed: int
    num_good: int
    num_rejected: int
    num_expired: int
    good_share: float
    outcomes: dict[str, int]
    duration_s: float
    goodput_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft: Durations
    itl: Durations
    total: Durations
    queue: Durations
    kv_utilisation: float
    kv_utilisation_max: float
    kv_waste: float
    prefix_hit_rate: float
    prefill_waste: float
    num_preemptions: int
    num_steps: int
    served_ratio: float | None
    tenants: tuple[TenantSummary, ...]


def summarise(run: SimulationRun) -> Summary:
    """Summarise a run that has ended."""
    recorder = run.recorder
    table = recorder.table
    arrival_s = table.seconds("arrival_s")
    front_s = run.config.front_s
    ttft_s = table.seconds("first_token_s") - arrival_s + front_s
    is_completed = has_outcome(table, _COMPLETED)
    is_good = good_requests(table, run.config.targets, front_s)
    num = len(table)
    duration_s = float(table.seconds("end_s").max() - arrival_s.min()) if num else 0.0
    per_s = 1.0 / duration_s if duration_s > 0.0 else math.nan
    was_admitted = ~np.isnan(table.seconds("admitted_s"))
    num_prompt = table.counts("num_prompt_tokens")
    num_cached = table.counts("num_cached_tokens")
    num_prefill = table.counts("num_prefill_tokens")
    is_late = has_outcome(table, (*_EXPIRED, *_UNREACHABLE))
    memory = memory_figures(recorder.samples, run.config.num_blocks, run.config.block_size)
    return Summary(
        num_requests=num,
        num_completed=int(is_completed.sum()),
        num_good=int(is_good.sum()),
        num_rejected=int(has_outcome(table, _REJECTED).sum()),
        num_expired=int(has_outcome(table, _EXPIRED).sum()),
        good_share=_share(is_good.sum(), num),
        outcomes=_outcomes(table),
        duration_s=duration_s,
        goodput_per_s=int(is_good.sum()) * per_s,
        requests_per_s=int(is_completed.sum()) * per_s,
        output_tokens_per_s=int(table.counts("num_output_tokens").sum()) * per_s,
        prompt_tokens_per_s=int(num_prompt[was_admitted].sum()) * per_s,
        ttft=durations(ttft_s),
        itl=_of_histogram(recorder.gaps),
        total=durations((table.seconds("end_s") - arrival_s + front_s)[is_completed]),
        queue=durations(table.seconds("admitted_s") - arrival_s),
        kv_utilisation=memory[0],
        kv_utilisation_max=memory[1],
        kv_waste=memory[2],
        prefix_hit_rate=_share(num_cached[was_admitted].sum(), num_prompt[was_admitted].sum()),
        prefill_waste=_share(num_prefill[is_late].sum(), num_prefill.sum()),
        num_preemptions=int(table.counts("num_preemptions").sum()),
        num_steps=recorder.num_steps,
        served_ratio=served_ratio(table, tenant_service(recorder), recorder.timeline_bin_s),
        tenants=_tenants(table, ttft_s, is_completed, is_good),
    )


def good_requests(
    table: RequestColumns, targets: Targets, front_s: float = 0.0
) -> NDArray[np.bool_]:
    """Return which requests completed within both targets; bool [len(table)].

    `front_s`: time outside the engine, added to the TTFT. The recorder that filled `table` must
    have counted slow gaps with `targets.itl_s`.
    """
    ttft_s = table.seconds("first_token_s") - table.seconds("arrival_s") + front_s
    # For a request without a first token the comparison is false.
    good: NDArray[np.bool_] = has_outcome(table, _COMPLETED) & (ttft_s <= targets.ttft_s)
    return good & has_smooth_tokens(table)


def has_smooth_tokens(table: RequestColumns) -> NDArray[np.bool_]:
    """Return which requests have at most 1 % slow gaps between their tokens (see `RunRecorder`);
    bool [len(table)]. True for requests without gaps.
    """
    num_gaps = np.maximum(table.counts("num_output_tokens") - 1, 0)
    smooth: NDArray[np.bool_] = table.counts("num_slow_gaps") <= SLOW_GAP_SHARE * num_gaps
    return smooth


def has_outcome(table: RequestColumns, names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return which requests have one of these outcomes; bool [len(table)]."""
    wanted = [index for index, name in enumerate(table.outcomes) if name in names]
    return np.isin(table.counts("outcome"), wanted)


def durations(values_s: NDArray[np.float64]) -> Durations:
    """Return the statistics of the values that are not NaN; percentiles are interpolated
    linearly.
    """
    known = values_s[~np.isnan(values_s)]
    if not len(known):
        return Durations(
            mean_s=math.nan, p50_s=math.nan, p90_s=math.nan, p99_s=math.nan, max_s=math.nan
        )
    p50, p90, p99 = (float(value) for value in np.percentile(known, (50.0, 90.0, 99.0)))
    return Durations(
        mean_s=float(known.mean()), p50_s=p50, p90_s=p90, p99_s=p99, max_s=float(known.max())
    )


def memory_figures(
    samples: MemorySamples, num_blocks: int, block_size: int
) -> tuple[float, float, float]:
    """Return three shares: the time-weighted mean and the maximum of the share of blocks in use,
    and the time-weighted share of empty token slots in the used blocks.

    All are NaN without two samples at different times; the third is also NaN if no block was used.
    """
    if len(samples.at_s) < 2:
        return math.nan, math.nan, math.nan
    at_s = np.array(samples.at_s)
    # There are no samples while idle, so the weight of a sample is limited to the 99th percentile
    # of the intervals.
    spans_s = np.diff(at_s, append=at_s[-1])
    weights = np.minimum(spans_s, np.percentile(spans_s, 99.0))
    used = np.array(samples.num_used_blocks, dtype=np.float64)
    unused_tokens = np.array(samples.num_unused_tokens, dtype=np.float64)
    weight = float(weights.sum())
    if not weight:
        return math.nan, math.nan, math.nan
    places = float((weights * used).sum()) * block_size
    return (
        float((weights * used).sum()) / weight / num_blocks,
        float(used.max()) / num_blocks,
        float((weights * unused_tokens).sum()) / places if places else math.nan,
    )


def _of_histogram(gaps: DurationHistogram) -> Durations:
    return Durations(
        mean_s=gaps.mean_s,
        p50_s=gaps.percentile_s(50.0),
        p90_s=gaps.percentile_s(90.0),
        p99_s=gaps.percentile_s(99.0),
        max_s=gaps.max_s,
    )


def _outcomes(table: RequestColumns) -> dict[str, int]:
    counts = np.bincount(table.counts("outcome"), minlength=len(table.outcomes)).tolist()
    return {name: num for name, num in zip(table.outcomes, counts, strict=True) if num}


def _tenants(
    table: RequestColumns,
    ttft_s: NDArray[np.float64],
    is_completed: NDArray[np.bool_],
    is_good: NDArray[np.bool_],
) -> tuple[TenantSummary, ...]:
    summaries: list[TenantSummary] = []
    is_late = has_outcome(table, (*_EXPIRED, *_REJECTED))
    for index, tenant in enumerate(table.tenants):
        is_its = table.counts("tenant") == index
        num = int(is_its.sum())
        summaries.append(
            TenantSummary(
                tenant=tenant,
                num_requests=num,
                num_completed=int((is_its & is_completed).sum()),
                num_late=int((is_its & is_late).sum()),
                num_served_tokens=int(table.counts("num_output_tokens")[is_its].sum()),
                good_share=_share((is_its & is_good).sum(), num),
                ttft=durations(ttft_s[is_its]),
                ttft_p99_of_all_s=_p99_of_all(ttft_s[is_its]),
            )
        )
    return tuple(summaries)


def _p99_of_all(values_s: NDArray[np.float64]) -> float:
    """Return the nearest-rank p99 of the values, with NaN counted as infinity; NaN if there are
    none.
    """
    if not len(values_s):
        return math.nan
    waited_s = np.where(np.isnan(values_s), math.inf, values_s)
    return float(np.percentile(waited_s, 99.0, method="inverted_cdf"))


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else math.nan


PROMPT_TOKEN_WEIGHT = 1.0
OUTPUT_TOKEN_WEIGHT = 2.0


def tenant_service(recorder: RunRecorder) -> NDArray[np.float64]:
    """Return the service that tenants received, in weighted tokens per time bin and tenant, float64
    [bins, tenants]: prompt tokens with weight 1, output tokens with weight 2.

    A prompt is counted in the bin of the request's first output token, without its cached tokens.
    """
    served: NDArray[np.float64] = np.asarray(recorder.served_tokens(), dtype=np.float64)
    served *= OUTPUT_TOKEN_WEIGHT
    table = recorder.table
    first_token_s = table.seconds("first_token_s")
    has_token = ~np.isnan(first_token_s)
    bins = (first_token_s[has_token] / recorder.timeline_bin_s).astype(np.int64)
    num_computed = table.counts("num_prompt_tokens") - table.counts("num_cached_tokens")
    np.add.at(
        served,
        (bins, table.counts("tenant")[has_token]),
        PROMPT_TOKEN_WEIGHT * num_computed[has_token],
    )
    return served


def served_ratio(
    table: RequestColumns, service: NDArray[np.float64], timeline_bin_s: float
) -> float | None:
    """Return the highest total service of a tenant divided by the lowest. The totals include only
    time bins at whose start and end every tenant had requests waiting.

    `service` float64 [bins, tenants]: see `tenant_service`. 1: equal service; infinite: a tenant
    got no service. None with fewer than two tenants, or without such a bin.
    """
    num_bins, num_tenants = service.shape
    if num_tenants < 2 or not num_bins:
        return None
    edges_s: NDArray[np.float64] = np.arange(num_bins + 1, dtype=np.float64)
    edges_s *= timeline_bin_s
    waiting = np.stack([_num_waiting(table, t, edges_s) for t in range(num_tenants)], axis=1)
    is_contended = (np.minimum(waiting[:-1], waiting[1:]) > 0).all(axis=1)
    if not is_contended.any():
        return None
    totals = service[is_contended].sum(axis=0)
    lowest = float(totals.min())
    return float(totals.max()) / lowest if lowest else float("inf")


def _num_waiting(
    table: RequestColumns, tenant: int, at_s: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the number of requests of the tenant with this index that wait for admission at each
    time, int64 [len(at_s)].
    """
    is_its = table.counts("tenant") == tenant
    admitted_s = table.seconds("admitted_s")[is_its]
    # A rejected or expired request stops waiting at its end.
    left_s = np.where(np.isnan(admitted_s), table.seconds("end_s")[is_its], admitted_s)
    arrived = np.searchsorted(table.seconds("arrival_s")[is_its], at_s, side="right")
    left = np.searchsorted(np.sort(left_s), at_s, side="right")
    return arrived - left
