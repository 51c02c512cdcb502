"""The charts of a run.

Owns the choice. Does not draw.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.tools.simulation.chart import Chart, Series
from penstock.tools.simulation.simulate import SimulationRun


def charts_of(run: SimulationRun) -> tuple[Chart, ...]:
    """Latencies as cumulative shares; queue, memory and tenants over time."""
    table, samples = run.recorder.table, run.recorder.samples
    arrival_s = table.seconds("arrival_s")
    gaps_s, gap_shares = run.recorder.gaps.cumulative()
    at_s = np.array(samples.at_s, dtype=np.float64)
    used = np.array(samples.num_used_blocks, dtype=np.float64)
    return (
        Chart(
            name="ttft",
            title="Time to first token and queue time",
            x_label="milliseconds",
            y_label="share of requests",
            series=(
                _cumulative(
                    "TTFT", table.seconds("first_token_s") - arrival_s + run.config.front_s
                ),
                _cumulative("queue", table.seconds("admitted_s") - arrival_s),
            ),
            is_log_x=True,
        ),
        Chart(
            name="itl",
            title="Time between tokens",
            x_label="milliseconds",
            y_label="share of gaps",
            series=(Series(name="ITL", x=gaps_s * 1e3, y=gap_shares),),
            is_log_x=True,
        ),
        Chart(
            name="load",
            title="Requests",
            x_label="virtual seconds",
            y_label="requests",
            series=(
                Series(name="running", x=at_s, y=np.array(samples.num_running, np.float64)),
                Series(name="waiting", x=at_s, y=np.array(samples.num_waiting, np.float64)),
            ),
        ),
        Chart(
            name="memory",
            title="KV blocks in use",
            x_label="virtual seconds",
            y_label="share of blocks",
            series=(Series(name="used", x=at_s, y=used / run.config.num_blocks),),
        ),
        _tenants(run),
    )


def _tenants(run: SimulationRun) -> Chart:
    recorder = run.recorder
    served = recorder.served_tokens() / recorder.timeline_bin_s
    middles_s: NDArray[np.float64] = np.arange(len(served), dtype=np.float64)
    middles_s = (middles_s + np.float64(0.5)) * np.float64(recorder.timeline_bin_s)
    return Chart(
        name="tenants",
        title="Output tokens served",
        x_label="virtual seconds",
        y_label="tokens/s",
        series=tuple(
            Series(name=tenant or "all requests", x=middles_s, y=served[:, index])
            for index, tenant in enumerate(recorder.table.tenants)
        ),
    )


def _cumulative(name: str, values_s: NDArray[np.float64]) -> Series:
    known = np.sort(values_s[~np.isnan(values_s)])
    return Series(name=name, x=known * 1e3, y=np.arange(1, len(known) + 1) / max(1, len(known)))
