"""A plan's report: a table for people, JSON for programs, one HTML page.

Owns the formats, the charts and the text on the plan's limits. Does not plan.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from penstock.server.settings.json_values import to_json_value
from penstock.tools.charts import Chart, Series, svg
from penstock.tools.pages import (
    aligned,
    finite_or_none,
    html_table,
    number_text,
    page,
    preformatted,
    seconds_text,
    share_text,
)
from penstock.tools.plan.plan import CandidatePlan, Plan
from penstock.tools.plan.target import PlanTarget, Verdict

PLAN_FILE = "plan.json"
PAGE_FILE = "plan.html"

_COLUMNS = (
    "candidate",
    "router",
    "replicas",
    "price",
    "TTFT p50",
    "TTFT p99",
    "smooth",
    "good",
    "goodput/s",
    "prefix hits",
)
_TRIED_COLUMNS = (
    "candidate",
    "replicas",
    "TTFT p50",
    "TTFT p99",
    "smooth",
    "p99 of gaps",
    "good",
    "KV used at most",
    "misses",
)
_LIMITS = (
    "The network, the fronts and the link take no simulated time except front_s, a candidate's"
    " field (0 by default): reserve a part of the TTFT target for them.",
    "No failures are simulated: add one replica, so that one may fail or restart at the peak.",
    "The trace is one sample of its traffic. Its burstiness is kept, but a worse hour may exist,"
    " and --load makes the same users send sooner; it does not add users.",
    "Step times come from the cost model. Calibrate it on the target machine"
    " (penstock simulate --calibrate-from) and check the error of the fit.",
    "Every replica starts with an empty cache, so hit rates are lower than in steady state.",
    "The answer met the target and the number below it did not, both simulated; other numbers were"
    " simulated only where they are listed.",
)


def plan_lines(plan: Plan) -> list[str]:
    """Format the plan as text."""
    window, best = plan.window, plan.best
    lines = [
        f"target       {target_text(plan.target)}",
        f"planned for  {window_text(plan)}",
        "",
        *aligned([_COLUMNS, *_rows(plan)]),
        "",
    ]
    lines.append(
        f"no candidate meets the target with up to {plan.max_replicas} replicas"
        if best is None
        else f"needed       {_answer(best)}"
    )
    lines += [
        f"not monotone {found.candidate.name}: more replicas failed where fewer held:"
        f" {_holding(found)}"
        for found in plan.candidates
        if not found.is_monotone
    ]
    if window.num_left_out:
        lines.append(f"excluded     {window.num_left_out:,} requests outside the window")
    return [*lines, "", "limits of the plan:", *(f"- {text}" for text in _LIMITS)]


def plan_json(plan: Plan) -> str:
    """Format the plan as JSON; unknown and infinite values are null."""
    window = plan.window
    document = {
        "target": dataclasses.asdict(plan.target),
        "window": {
            "num_requests": len(window.requests),
            "start_s": window.start_s,
            "end_s": window.end_s,
            "num_trace_requests": window.num_trace_requests,
            "trace_s": window.trace_s,
        },
        "max_replicas": plan.max_replicas,
        "num_curve_requests": plan.num_curve_requests,
        "best": None if plan.best is None else plan.best.candidate.name,
        "candidates": [_candidate_json(found) for found in plan.candidates],
        "not_included": list(_LIMITS),
    }
    return json.dumps(finite_or_none(document), indent=2, allow_nan=False)


def write_plan_report(plan: Plan, folder: Path) -> tuple[Chart, ...]:
    """Write `plan.json` and `plan.html`; returns the page's charts. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN_FILE).write_text(plan_json(plan) + "\n", encoding="utf-8")
    charts = plan_charts(plan)
    answer = "No candidate meets the target" if plan.best is None else _answer(plan.best)
    sections = [
        preformatted("\n".join(plan_lines(plan))),
        *(f"<!-- {chart.name} -->\n{svg(chart)}" for chart in charts),
        "<h2>What was simulated</h2>",
        html_table(_TRIED_COLUMNS, [row for found in plan.candidates for row in _tried(found)]),
        "<h2>Candidates</h2>",
        preformatted(json.dumps([_settings(found) for found in plan.candidates], indent=2)),
    ]
    (folder / PAGE_FILE).write_text(page(f"Plan: {answer}", sections), encoding="utf-8")
    return charts


def plan_charts(plan: Plan) -> tuple[Chart, ...]:
    """Chart p99 TTFT and good share over replicas, goodput and p99 TTFT over the load of one."""
    found = plan.candidates
    per_replica = [_over_replicas(each, [v.ttft_p99_s * 1e3 for v in each.tried]) for each in found]
    most = max(verdict.num_replicas for each in found for verdict in each.tried)
    target = _level("target", 1.0, float(most), plan.target.ttft_p99_s * 1e3)
    charts = [
        Chart(
            name="ttft_replicas",
            title="p99 TTFT against the number of replicas",
            x_label="replicas",
            y_label="milliseconds",
            series=(*per_replica, target),
            is_log_y=True,
        ),
        Chart(
            name="good_replicas",
            title="Share of good requests against the number of replicas",
            x_label="replicas",
            y_label="share of requests",
            series=tuple(
                _over_replicas(each, [v.good_share for v in each.tried]) for each in found
            ),
        ),
    ]
    loads = [point.offered_per_s for each in found for point in each.curve]
    if not loads:
        return tuple(charts)
    ideal = Series(name="all good", x=np.array([0.0, max(loads)]), y=np.array([0.0, max(loads)]))
    charts += [
        Chart(
            name="goodput_load",
            title="Goodput of one replica against its load",
            x_label="requests/s offered to one replica",
            y_label="good requests/s",
            series=(
                *(
                    _over_load(each, [p.verdict.goodput_per_s for p in each.curve])
                    for each in found
                ),
                ideal,
            ),
        ),
        Chart(
            name="ttft_load",
            title="p99 TTFT of one replica against its load",
            x_label="requests/s offered to one replica",
            y_label="milliseconds",
            series=(
                *(
                    _over_load(each, [p.verdict.ttft_p99_s * 1e3 for p in each.curve])
                    for each in found
                ),
                _level("target", 0.0, max(loads), plan.target.ttft_p99_s * 1e3),
            ),
            is_log_y=True,
        ),
    ]
    return tuple(charts)


def verdict_text(verdict: Verdict) -> str:
    """Format one simulation as one line."""
    end = "meets the target" if verdict.meets else f"misses {', '.join(verdict.misses)}"
    return (
        f"p99 TTFT {seconds_text(verdict.ttft_p99_s)},"
        f" {share_text(verdict.smooth_share, 2)} smooth,"
        f" {share_text(verdict.good_share, 2)} good: {end} ({verdict.wall_s:.1f} s)"
    )


def target_text(target: PlanTarget) -> str:
    """Format the targets as one line."""
    text = (
        f"p99 TTFT {seconds_text(target.ttft_p99_s)}; 99 % of requests with 99 % of their gaps"
        f" within {seconds_text(target.itl_p99_s)}"
    )
    if target.good_share is not None:
        text += f"; {target.good_share:.2%} of requests good"
    return text


def window_text(plan: Plan) -> str:
    """Describe the planned part of the trace in one line."""
    window = plan.window
    num = len(window.requests)
    text = f"{num:,} requests, {window.requests_per_s:.3f} requests/s"
    if not window.num_left_out:
        return f"{text}: all of the trace, {window.trace_s:,.0f} s"
    return (
        f"{text}: the busiest {window.end_s - window.start_s:,.0f} s, from {window.start_s:,.0f} s"
        f" on, of {window.num_trace_requests:,} requests in {window.trace_s:,.0f} s"
    )


def _answer(found: CandidatePlan) -> str:
    num, router = found.num_replicas, found.candidate.routing.router
    cost = "" if found.price is None else f" at {found.price:g}"
    spare = "; add one to tolerate a failure"
    return f"{num} x {found.candidate.name} behind {router}{cost}{spare}"


def _holding(found: CandidatePlan) -> str:
    words = (f"{v.num_replicas} {'held' if v.meets else 'failed'}" for v in found.tried)
    return ", ".join(words)


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            found.candidate.name,
            str(found.candidate.routing.router),
            f"> {plan.max_replicas}" if found.num_replicas is None else str(found.num_replicas),
            "-" if found.price is None else f"{found.price:g}",
            _time(found.verdict.ttft_p50_s),
            _time(found.verdict.ttft_p99_s),
            share_text(found.verdict.smooth_share, 2),
            share_text(found.verdict.good_share, 2),
            number_text(found.verdict.goodput_per_s, 3),
            share_text(found.verdict.prefix_hit_rate),
        )
        for found in plan.candidates
    ]


def _tried(found: CandidatePlan) -> list[tuple[str, ...]]:
    return [
        (
            found.candidate.name,
            str(verdict.num_replicas),
            _time(verdict.ttft_p50_s),
            _time(verdict.ttft_p99_s),
            share_text(verdict.smooth_share, 2),
            _time(verdict.itl_p99_s),
            share_text(verdict.good_share, 2),
            share_text(verdict.kv_utilisation_max),
            ", ".join(verdict.misses) or "none",
        )
        for verdict in found.tried
    ]


def _candidate_json(found: CandidatePlan) -> dict[str, Any]:
    return {
        **_settings(found),
        "num_replicas": found.num_replicas,
        "total_price": found.price,
        "is_monotone": found.is_monotone,
        "tried": [dataclasses.asdict(verdict) for verdict in found.tried],
        "curve": [
            {"offered_per_s": point.offered_per_s, **dataclasses.asdict(point.verdict)}
            for point in found.curve
        ],
    }


def _settings(found: CandidatePlan) -> dict[str, Any]:
    candidate = found.candidate
    settings = {
        "name": candidate.name,
        "price": candidate.price,
        "routing": to_json_value(candidate.routing),
        "replica": to_json_value(candidate.replica),
    }
    return {name: finite_or_none(value) for name, value in settings.items()}


def _over_replicas(found: CandidatePlan, values: list[float]) -> Series:
    x = np.array([verdict.num_replicas for verdict in found.tried], dtype=np.float64)
    return Series(name=found.candidate.name, x=x, y=np.array(values, dtype=np.float64))


def _over_load(found: CandidatePlan, values: list[float]) -> Series:
    x = np.array([point.offered_per_s for point in found.curve], dtype=np.float64)
    return Series(name=found.candidate.name, x=x, y=np.array(values, dtype=np.float64))


def _level(name: str, start: float, end: float, value: float) -> Series:
    return Series(name=name, x=np.array([start, end]), y=np.array([value, value]))


def _time(value_s: float) -> str:
    return "never" if value_s == math.inf else seconds_text(value_s)
