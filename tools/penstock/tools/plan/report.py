"""Reports a plan as a text table, as JSON and as one HTML page."""

import dataclasses
import json
import math
from html import escape
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
from penstock.tools.plan.candidates import Candidate
from penstock.tools.plan.plan import CandidatePlan, ImpossibleCandidate, Plan
from penstock.tools.plan.target import ClusterResult, PlanTarget

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
    "The network, the fronts (gRPC server processes) and their connections to the engine take no"
    " simulated time except --front-ms (a candidate's front_ms; 0 by default): reserve a part of"
    " the TTFT target for them.",
    "No failures are simulated: add one replica, so that one may fail or restart at the peak.",
    "The trace is one sample of its traffic. Its burstiness is kept, but a worse hour may exist,"
    " and --load makes the same users send sooner; it does not add users.",
    "Step times come from the cost model. Calibrate it on the target machine"
    " (penstock simulate --calibrate-from) and check the error of the fit.",
    "Every replica starts with an empty cache, so hit rates are lower than in steady state.",
)


def plan_lines(plan: Plan) -> list[str]:
    """Format the plan and its limitations as lines of text."""
    return [*_result(plan), "", "limits of the plan:", *(f"- {text}" for text in _limits(plan))]


def _result(plan: Plan) -> list[str]:
    window = plan.window
    lines = [
        f"target       {target_text(plan.target)}",
        f"planned for  {window_text(plan)}",
        "",
    ]
    if plan.candidates:
        lines += [*aligned([_COLUMNS, *_rows(plan)]), ""]
    lines += [f"impossible   {_bound_text(found, plan.target)}" for found in plan.impossible]
    lines.append(_no_answer(plan) if plan.best is None else f"needed       {_answer(plan.best)}")
    lines += [
        f"not monotone {found.candidate.name}: more replicas failed where fewer held:"
        f" {_holding(found)}"
        for found in plan.candidates
        if not found.is_monotone
    ]
    if window.num_left_out:
        lines.append(f"excluded     {window.num_left_out:,} requests outside the window")
    return lines


def plan_json(plan: Plan) -> str:
    """Format the plan as JSON; values that are unknown or infinite are null."""
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
        "impossible": [
            {**_settings(found.candidate), "lower_bound": dataclasses.asdict(found.bound)}
            for found in plan.impossible
        ],
        "not_included": _limits(plan),
    }
    return json.dumps(finite_or_none(document), indent=2, allow_nan=False)


def write_plan_report(plan: Plan, folder: Path) -> None:
    """Write `plan.json` and `plan.html`. Creates the folder if it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN_FILE).write_text(plan_json(plan) + "\n", encoding="utf-8")
    answer = "No candidate meets the target" if plan.best is None else _answer(plan.best)
    tried = [row for found in plan.candidates for row in _tried(found)]
    candidates = [found.candidate for found in plan.candidates]
    candidates += [found.candidate for found in plan.impossible]
    limits = "".join(f"<li>{escape(text)}</li>\n" for text in _limits(plan))
    sections = [
        preformatted("\n".join(_result(plan))),
        f"<p>Limits of the plan:</p>\n<ul>\n{limits}</ul>",
        *map(svg, plan_charts(plan)),
        *(("<h2>What was simulated</h2>", html_table(_TRIED_COLUMNS, tried)) if tried else ()),
        "<h2>Candidates</h2>",
        preformatted(json.dumps([_settings(each) for each in candidates], indent=2)),
    ]
    (folder / PAGE_FILE).write_text(page(f"Plan: {answer}", sections), encoding="utf-8")


def plan_charts(plan: Plan) -> tuple[Chart, ...]:
    """Return charts of p99 TTFT and the share of good requests by number of replicas, and, if load
    curves were simulated, of goodput and p99 TTFT by the load of one replica; empty if nothing was
    simulated.
    """
    found = plan.candidates
    if not found:
        return ()
    target_ms = plan.target.ttft_p99_s * 1e3
    most = max(result.num_replicas for each in found for result in each.tried)
    charts = [
        Chart(
            name="ttft_replicas",
            title="p99 TTFT by number of replicas",
            x_label="replicas",
            y_label="milliseconds",
            series=(
                *(_over_replicas(each, [v.ttft_p99_s * 1e3 for v in each.tried]) for each in found),
                _reference("target", (0.0, most), (target_ms, target_ms)),
            ),
            has_marks=True,
            y_limit=2.0 * target_ms,
            limit_text="twice the target",
        ),
        Chart(
            name="good_replicas",
            title="Share of good requests by number of replicas",
            x_label="replicas",
            y_label="share of requests",
            series=tuple(
                _over_replicas(each, [v.good_share for v in each.tried]) for each in found
            ),
            has_marks=True,
        ),
    ]
    loads = [point.offered_per_s for each in found for point in each.curve]
    if not loads:
        return tuple(charts)
    span = (0.0, max(loads))
    charts += [
        Chart(
            name="goodput_load",
            title="Goodput of one replica by its load",
            x_label="requests/s offered to one replica",
            y_label="good requests/s",
            series=(
                *(_over_load(each, [p.result.goodput_per_s for p in each.curve]) for each in found),
                _reference("all good", span, span),
            ),
            has_marks=True,
        ),
        Chart(
            name="ttft_load",
            title="p99 TTFT of one replica by its load",
            x_label="requests/s offered to one replica",
            y_label="milliseconds",
            series=(
                *(
                    _over_load(each, [p.result.ttft_p99_s * 1e3 for p in each.curve])
                    for each in found
                ),
                _reference("target", span, (target_ms, target_ms)),
            ),
            has_marks=True,
            y_limit=2.0 * target_ms,
            limit_text="twice the target",
        ),
    ]
    return tuple(charts)


def result_text(result: ClusterResult) -> str:
    """Format the main figures of a simulation, and which targets it misses, as one line."""
    end = "meets the target" if result.meets else f"misses {', '.join(result.misses)}"
    return (
        f"p99 TTFT {seconds_text(result.ttft_p99_s)},"
        f" {share_text(result.smooth_share, 2)} smooth,"
        f" {share_text(result.good_share, 2)} good: {end} ({result.wall_s:.1f} s)"
    )


def target_text(target: PlanTarget) -> str:
    """Format the targets of a plan as one line."""
    text = (
        f"p99 TTFT {seconds_text(target.ttft_p99_s)}; 99 % of requests smooth (99 % of their gaps"
        f" within {seconds_text(target.itl_p99_s)})"
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


def _no_answer(plan: Plan) -> str:
    limit = f"up to {_replicas(plan.max_replicas)}" if plan.candidates else "any number of replicas"
    return f"no candidate meets the target with {limit}"


def _bound_text(found: ImpossibleCandidate, target: PlanTarget) -> str:
    bound = found.bound
    texts = {
        "p99 TTFT": _at_least("p99 TTFT", bound.ttft_p99_s, target.ttft_p99_s),
        "p99 ITL": _at_least("p99 ITL", bound.itl_p99_s, target.itl_p99_s),
        "good share": f"at most {share_text(bound.good_share, 2)} of requests are good",
    }
    misses = "; ".join(texts[name] for name in bound.misses)
    return f"{found.candidate.name}: on an idle replica, {misses}"


def _at_least(name: str, bound_s: float, target_s: float) -> str:
    return f"{name} is at least {seconds_text(bound_s)} (target: {target_s * 1e3:g} ms)"


def _limits(plan: Plan) -> list[str]:
    """Return the limitations of the plan, one text each; the last one states what was simulated."""
    others = "other numbers were simulated only where they are listed."
    if not plan.candidates:
        last = "Nothing was simulated: the bounds are computed from the cost model."
    elif plan.best is None or plan.best.num_replicas is None:
        most = _replicas(plan.max_replicas)
        last = f"{most} missed the target in the simulation; {others}"
    elif plan.best.num_replicas == 1:
        last = f"1 replica met the target in the simulation; {others}"
    else:
        num = plan.best.num_replicas
        last = f"{num} replicas met the target and {num - 1} did not, both simulated; {others}"
    return [*_LIMITS, last]


def _replicas(num: int) -> str:
    return "1 replica" if num == 1 else f"{num} replicas"


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
            _time(found.result.ttft_p50_s),
            _time(found.result.ttft_p99_s),
            share_text(found.result.smooth_share, 2),
            share_text(found.result.good_share, 2),
            number_text(found.result.goodput_per_s, 3),
            share_text(found.result.prefix_hit_rate),
        )
        for found in plan.candidates
    ]


def _tried(found: CandidatePlan) -> list[tuple[str, ...]]:
    return [
        (
            found.candidate.name,
            str(result.num_replicas),
            _time(result.ttft_p50_s),
            _time(result.ttft_p99_s),
            share_text(result.smooth_share, 2),
            _time(result.itl_p99_s),
            share_text(result.good_share, 2),
            share_text(result.kv_utilisation_max),
            ", ".join(result.misses) or "none",
        )
        for result in found.tried
    ]


def _candidate_json(found: CandidatePlan) -> dict[str, Any]:
    return {
        **_settings(found.candidate),
        "num_replicas": found.num_replicas,
        "total_price": found.price,
        "is_monotone": found.is_monotone,
        "tried": [dataclasses.asdict(result) for result in found.tried],
        "curve": [
            {"offered_per_s": point.offered_per_s, **dataclasses.asdict(point.result)}
            for point in found.curve
        ],
    }


def _settings(candidate: Candidate) -> dict[str, Any]:
    settings = {
        "name": candidate.name,
        "price": candidate.price,
        "routing": to_json_value(candidate.routing),
        "replica": to_json_value(candidate.replica),
    }
    return {name: finite_or_none(value) for name, value in settings.items()}


def _over_replicas(found: CandidatePlan, values: list[float]) -> Series:
    x = np.array([result.num_replicas for result in found.tried], dtype=np.float64)
    return Series(name=found.candidate.name, x=x, y=np.array(values, dtype=np.float64))


def _over_load(found: CandidatePlan, values: list[float]) -> Series:
    x = np.array([point.offered_per_s for point in found.curve], dtype=np.float64)
    return Series(name=found.candidate.name, x=x, y=np.array(values, dtype=np.float64))


def _reference(name: str, x: tuple[float, float], y: tuple[float, float]) -> Series:
    return Series(name=name, x=np.array(x), y=np.array(y), is_reference=True)


def _time(value_s: float) -> str:
    return "never" if value_s == math.inf else seconds_text(value_s)
