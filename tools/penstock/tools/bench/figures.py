"""Computes the figures of a run (percentiles, rates, errors) and warnings about their
reliability.
"""

import math
from dataclasses import dataclass

from penstock.tools.bench.fleet import LoadRun
from penstock.tools.bench.latency_histogram import LatencyHistogram
from penstock.tools.bench.recorder import HISTOGRAMS

MAX_LATE_SHARE = 0.1
"""p99 send delay of the client, as a share of the median TTFT, above which a warning is given."""
_HARMLESS_LATENESS_S = 0.005
"""p99 send delay, seconds, up to which no warning is given, because event loop timers have a
resolution of 1 ms.
"""
MAX_CPU_SHARE = 0.6
"""CPU use of a client process (share of one core) above which it may read responses late; gives a
warning.
"""
_MIN_IDLE_CORES = 0.5
"""With fewer idle cores than this, an additional client process would slow down other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFigures:
    """Statistics of one kind of latency, in seconds; NaN if there are no values. `num`: number of
    values.
    """

    num: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    p999_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """The number of requests that failed with this gRPC status and error reason ("" if there was
    none).
    """

    status: str
    reason: str
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The figures of one run. Requests that are due during the warm-up are not counted.

    `num_due`: the sum of completed, failed, dropped (not sent, because too many were open or the
    run ended first) and unfinished (still open when the run ended) requests. `num_good`: completed
    within the targets. `num_short`: completed, but with another number of tokens than requested or
    another finish reason than LENGTH. `good_share`: `num_good` over `num_due`. `sending_s`,
    `duration_s`, `cpu_shares`, `num_idle_cores`: as in LoadRun.

    `offered_per_s`: `num_due` over `sending_s`; NaN in a closed loop, where the server determines
    when requests are sent. `requests_per_s`, `goodput_per_s`: completed and good requests over
    `duration_s`. `output_tokens_per_s`, `prompt_tokens_per_s`: tokens of the completed requests
    over `duration_s`. `cached_prompt_share`: the share of the completed requests' prompt tokens
    that the server found in its cache.

    `ttft` and `itl` cover all requests with tokens; `tpot`, `total` and `queue` only completed
    ones. `queue`: time in the server's queue, as the server reports it. `lateness`: delay between
    the time at which a request is due and the time at which it is sent.
    """

    arrivals: str
    rate_per_s: float | None
    concurrency: int | None
    sending_s: float
    duration_s: float
    num_due: int
    num_completed: int
    num_good: int
    num_failed: int
    num_dropped: int
    num_unfinished: int
    num_short: int
    num_preemptions: int
    good_share: float
    offered_per_s: float
    requests_per_s: float
    goodput_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_prompt_share: float
    ttft: LatencyFigures
    itl: LatencyFigures
    tpot: LatencyFigures
    total: LatencyFigures
    queue: LatencyFigures
    lateness: LatencyFigures
    errors: tuple[ErrorCount, ...]
    cpu_shares: tuple[float, ...]
    num_idle_cores: float | None


def figures_of(run: LoadRun) -> LoadFigures:
    """Compute the figures of a run."""
    plan, recorder = run.plan, run.recorder
    errors = sorted(recorder.errors.items(), key=lambda item: (-item[1], item[0]))
    return LoadFigures(
        arrivals=plan.arrivals.value,
        rate_per_s=plan.rate_per_s,
        concurrency=plan.concurrency,
        sending_s=run.sending_s,
        duration_s=run.duration_s,
        num_due=recorder.num_due,
        num_completed=recorder.num_completed,
        num_good=recorder.num_good,
        num_failed=recorder.num_failed,
        num_dropped=recorder.num_dropped,
        num_unfinished=recorder.num_unfinished,
        num_short=recorder.num_short,
        num_preemptions=recorder.num_preemptions,
        good_share=_ratio(recorder.num_good, recorder.num_due),
        offered_per_s=_ratio(recorder.num_due, run.sending_s) if plan.is_open_loop else math.nan,
        requests_per_s=_ratio(recorder.num_completed, run.duration_s),
        goodput_per_s=_ratio(recorder.num_good, run.duration_s),
        output_tokens_per_s=_ratio(recorder.num_output_tokens, run.duration_s),
        prompt_tokens_per_s=_ratio(recorder.num_prompt_tokens, run.duration_s),
        cached_prompt_share=_ratio(recorder.num_cached_prompt_tokens, recorder.num_prompt_tokens),
        errors=tuple(
            ErrorCount(status=status, reason=reason, num=num) for (status, reason), num in errors
        ),
        cpu_shares=run.cpu_shares,
        num_idle_cores=run.num_idle_cores,
        **{name: latency_figures(getattr(recorder, name)) for name in HISTOGRAMS},
    )


def latency_figures(histogram: LatencyHistogram) -> LatencyFigures:
    """Compute the statistics of one kind of latency."""
    return LatencyFigures(
        num=len(histogram),
        mean_s=histogram.mean_s,
        p50_s=histogram.percentile_s(50.0),
        p90_s=histogram.percentile_s(90.0),
        p95_s=histogram.percentile_s(95.0),
        p99_s=histogram.percentile_s(99.0),
        p999_s=histogram.percentile_s(99.9),
        max_s=histogram.max_s,
    )


def warnings_of(figures: LoadFigures) -> list[str]:
    """Return the reasons why the figures may be misleading."""
    warnings: list[str] = []
    late_s, median_s = figures.lateness.p99_s, figures.ttft.p50_s
    if figures.ttft.num and late_s > max(_HARMLESS_LATENESS_S, MAX_LATE_SHARE * median_s):
        warnings.append(
            f"the client sent late: p99 {late_s * 1e3:.1f} ms after the request was due, against a"
            f" median TTFT of {median_s * 1e3:.1f} ms, which includes it; {_remedy(figures)}"
        )
    busiest = max(figures.cpu_shares, default=0.0)
    if busiest > MAX_CPU_SHARE:
        warnings.append(
            f"a client process used {busiest:.0%} of a core and read late, so latencies include"
            f" the client's delay; {_remedy(figures)}"
        )
    if figures.num_dropped:
        warnings.append(
            f"{figures.num_dropped:,} requests were not sent: more were open than --max-in-flight"
            " allows, or the run ended first; latencies exclude them"
        )
    if figures.num_unfinished:
        warnings.append(
            f"{figures.num_unfinished:,} requests were open when the run ended; total time,"
            " throughput and tokens/s exclude them; raise --drain-s"
        )
    if figures.num_failed:
        share = figures.num_failed / figures.num_due
        warnings.append(f"{share:.1%} of the requests failed; the total time excludes them")
    if figures.num_short:
        warnings.append(
            f"{figures.num_short:,} requests completed with a number of tokens other than requested"
        )
    return warnings


def _remedy(figures: LoadFigures) -> str:
    """Return advice, for a warning, about a client that sends or reads late."""
    idle = figures.num_idle_cores
    if idle is not None and idle < _MIN_IDLE_CORES:
        return "no core of this machine was idle: lower the load, or run the client on another"
    return "raise --processes"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
