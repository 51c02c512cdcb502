"""Reports a run of several replicas: totals of the cluster, and a comparison of the replicas."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from penstock.server.settings.json_values import to_json_value
from penstock.tools.charts import Chart, Series, svg
from penstock.tools.pages import (
    finite_or_none,
    html_table,
    number_text,
    page,
    preformatted,
    seconds_text,
    share_text,
)
from penstock.tools.simulation.cluster import ClusterRun
from penstock.tools.simulation.report import (
    PAGE_FILE,
    REQUESTS_FILE,
    SUMMARY_FILE,
    charts_of,
    settings_of,
    summary_lines,
    write_requests,
)
from penstock.tools.simulation.simulate import SimulationRun
from penstock.tools.simulation.summary import Summary, summarise

_COLUMNS = (
    "replica",
    "requests",
    "good",
    "TTFT p50",
    "TTFT p99",
    "ITL p99",
    "prefix hits",
    "KV used",
    "preempted",
)
_PER_REPLICA_CHARTS = ("load", "memory")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """The summary of a whole run, and one of each replica.

    `total`: the summary of all requests. Its `kv_utilisation` is the mean over all replicas (0 for
    one without requests), its `kv_waste` the mean over the replicas, weighted by used blocks, and
    its `kv_utilisation_max` their maximum. `replicas`: the summary of each replica that received
    requests, over the time from that replica's first arrival to its last end. `numbers`: the
    indexes of these replicas.
    """

    total: Summary
    replicas: tuple[Summary, ...]
    numbers: tuple[int, ...]


def summarise_cluster(run: ClusterRun) -> ClusterSummary:
    """Summarise a run that has ended."""
    replicas = tuple(summarise(replica) for replica in run.replicas)
    used = np.array([replica.kv_utilisation for replica in replicas])
    wasted = np.array([replica.kv_waste for replica in replicas])
    is_known = ~(np.isnan(used) | np.isnan(wasted))
    in_use = float(used[is_known].sum())
    total = dataclasses.replace(
        summarise(run.total),
        # A replica without requests used no memory.
        kv_utilisation=in_use / run.config.num_replicas if is_known.any() else math.nan,
        kv_utilisation_max=max(
            (r.kv_utilisation_max for r in replicas if not math.isnan(r.kv_utilisation_max)),
            default=math.nan,
        ),
        kv_waste=float((used * wasted)[is_known].sum()) / in_use if in_use else math.nan,
    )
    return ClusterSummary(total=total, replicas=replicas, numbers=run.numbers)


def cluster_lines(run: ClusterRun, summary: ClusterSummary) -> list[str]:
    """Format the figures as lines of text: the whole cluster, then a table with one row per replica
    that received requests.
    """
    rows = [_COLUMNS, *_rows(summary)]
    return [
        *summary_lines(summary.total),
        f"routing      {run.config.routing.router}, {run.config.num_replicas} replicas,"
        f" {number_text(_spread(run), 2)} (most over mean requests of a replica)",
        *(" ".join(f"{cell:>11}" for cell in row) for row in rows),
    ]


def cluster_settings(run: ClusterRun) -> dict[str, Any]:
    """Return the settings of a cluster's run as JSON values."""
    return {
        **settings_of(run.total),
        "num_replicas": run.config.num_replicas,
        "routing": to_json_value(run.config.routing),
    }


def cluster_json(run: ClusterRun, summary: ClusterSummary) -> str:
    """Format settings and figures as JSON; figures that were not measured are null."""
    document = {
        "settings": cluster_settings(run),
        "figures": finite_or_none(dataclasses.asdict(summary.total)),
        "replicas": [
            {"replica": number, **finite_or_none(dataclasses.asdict(replica))}
            for number, replica in zip(summary.numbers, summary.replicas, strict=True)
        ],
        "wall_s": run.total.wall_s,
        "cpu_s": run.total.cpu_s,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def write_cluster_report(run: ClusterRun, summary: ClusterSummary, folder: Path) -> None:
    """Write `summary.json`, `requests.csv` and `report.html`.

    Creates the folder if it is missing. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_text(cluster_json(run, summary) + "\n", encoding="utf-8")
    write_requests(run.total, folder / REQUESTS_FILE, run.routes.tolist())
    sections = [
        preformatted("\n".join(summary_lines(summary.total))),
        "<h2>Replicas</h2>",
        html_table(_COLUMNS, _rows(summary)),
        *map(svg, cluster_charts(run)),
        "<h2>Settings</h2>",
        preformatted(json.dumps(cluster_settings(run), indent=2)),
    ]
    config = run.config
    title = f"Simulated: {config.num_replicas} x {config.replica.policy}, {config.routing.router}"
    (folder / PAGE_FILE).write_text(page(title, sections), encoding="utf-8")


def cluster_charts(run: ClusterRun) -> tuple[Chart, ...]:
    """Return the charts of the whole cluster, and two charts with a line per replica: unfinished
    requests, and KV blocks in use.
    """
    whole = [chart for chart in charts_of(run.total) if chart.name not in _PER_REPLICA_CHARTS]
    return (
        *whole,
        Chart(
            name="load",
            title="Unfinished requests per replica",
            x_label="virtual seconds",
            y_label="requests",
            series=tuple(
                _line(number, replica, _unfinished(replica))
                for number, replica in zip(run.numbers, run.replicas, strict=True)
            ),
        ),
        Chart(
            name="memory",
            title="KV blocks in use per replica",
            x_label="virtual seconds",
            y_label="share of blocks",
            series=tuple(
                _line(number, replica, _share_used(replica))
                for number, replica in zip(run.numbers, run.replicas, strict=True)
            ),
        ),
    )


def _rows(summary: ClusterSummary) -> list[tuple[str, ...]]:
    return [
        (
            str(number),
            f"{s.num_requests:,}",
            share_text(s.good_share),
            seconds_text(s.ttft.p50_s),
            seconds_text(s.ttft.p99_s),
            seconds_text(s.itl.p99_s),
            share_text(s.prefix_hit_rate),
            share_text(s.kv_utilisation),
            f"{s.num_preemptions:,}",
        )
        for number, s in zip(summary.numbers, summary.replicas, strict=True)
    ]


def _spread(run: ClusterRun) -> float:
    counts = np.bincount(run.routes, minlength=run.config.num_replicas)
    mean = float(counts.mean())
    return float(counts.max()) / mean if mean else math.nan


def _line(number: int, run: SimulationRun, values: list[float]) -> Series:
    at_s = np.array(run.recorder.samples.at_s, dtype=np.float64)
    return Series(name=str(number), x=at_s, y=np.array(values, dtype=np.float64))


def _unfinished(run: SimulationRun) -> list[float]:
    samples = run.recorder.samples
    pairs = zip(samples.num_running, samples.num_waiting, strict=True)
    return [float(num_running + num_waiting) for num_running, num_waiting in pairs]


def _share_used(run: SimulationRun) -> list[float]:
    return [num / run.config.num_blocks for num in run.recorder.samples.num_used_blocks]
