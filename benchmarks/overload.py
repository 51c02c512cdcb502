"""Measures goodput, rejections and health checks of a service under overload.

A real service with fronts (gRPC server processes), engine and sockets receives half to five times
its capacity in an open loop. Its executor is the simulated one, with steps of 20 ms. Reports, for
each load, the requests served in time, the time until a rejection arrives, and the duration of
health checks. With `--picture`, the curve is drawn.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from load import LoadRequest, RequestOutcome, arrivals_s, open_loop, sending
from penstock.client import NO_RETRY, Client, HealthStatus
from penstock.tools.charts import Chart, Series, svg
from report import (
    Check,
    Outcome,
    arguments,
    at_least,
    at_most,
    percentile_ms,
    print_rows,
    run,
)
from services import MEASURED, service, simulated

STEP_S = 0.02
NUM_SLOTS = 16
NUM_TOKENS = 20
MAX_WAITING = 32
PEAK_PER_S = NUM_SLOTS / (NUM_TOKENS * STEP_S)
"""Requests that the executor can serve per second if every slot is always in use."""
MAX_LAG_MS = 2.0
"""Maximum lag of the client's event loop. Above it, a time that misses its goal is inconclusive,
because the machine was busy; a time that meets the goal still counts.
"""
MAX_TTFT_S = 2.0
"""Maximum TTFT of a request that was served in time, seconds."""
LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
WARM_UP_S = 1.0
_TIMEOUT_S = 60.0
_PROBE_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The results at one load: rates per second, times in milliseconds.

    The rates count the requests that end while requests are sent, without the warm-up; the others
    count all.
    """

    load: float
    offered_per_s: float
    served_per_s: float
    goodput_per_s: float
    rejected_per_s: float
    rejection_p50_ms: float
    rejection_p99_ms: float
    health_p99_ms: float
    health_max_ms: float
    client_lag_p99_ms: float
    num_without_retry_time: int
    num_not_serving: int
    num_other_ends: int


@dataclass(slots=True)
class Probe:
    """Sends health checks during a load, and records their durations in seconds (`took_s`).

    `num_not_serving`: number of checks that returned a status other than SERVING. `lag_s`: lag of
    the client's event loop; all measured times include it.
    """

    took_s: list[float] = field(default_factory=list[float])
    lag_s: list[float] = field(default_factory=list[float])
    num_not_serving: int = 0

    async def run(self, client: Client) -> None:
        """Call the health method repeatedly until cancelled."""
        while True:
            begun_s = time.perf_counter()
            status = await client.health(deadline_s=_TIMEOUT_S)
            self.took_s.append(time.perf_counter() - begun_s)
            self.num_not_serving += status is not HealthStatus.SERVING
            due_s = time.perf_counter() + _PROBE_EVERY_S
            await asyncio.sleep(_PROBE_EVERY_S)
            self.lag_s.append(time.perf_counter() - due_s)


async def offer_load(address: str, rate_per_s: float, duration_s: float) -> Level:
    """Send requests at this rate for `duration_s` seconds in an open loop; return the results when
    the last request has ended.
    """
    times_s = arrivals_s(rate_per_s, duration_s, seed=int(rate_per_s * 1000))
    requests = [LoadRequest(at_s=at_s, num_tokens=NUM_TOKENS) for at_s in times_s]
    probe = Probe()
    async with (
        Client(address, retry=NO_RETRY) as client,
        # A separate connection.
        Client(address, retry=NO_RETRY) as aside,
    ):
        await client.health(deadline_s=_TIMEOUT_S)
        begun_s = time.perf_counter()
        probing = asyncio.create_task(probe.run(aside))
        seen = await open_loop(requests, sending(client))
        probing.cancel()
    return level_of(rate_per_s / PEAK_PER_S, begun_s, seen, probe, duration_s)


def level_of(
    load: float, begun_s: float, seen: list[RequestOutcome], probe: Probe, duration_s: float
) -> Level:
    """Return the figures of one load that started at `begun_s`."""
    span_s = duration_s - WARM_UP_S
    ended = [one for one in seen if WARM_UP_S <= one.ended_s - begun_s < duration_s]
    served = [one for one in ended if one.code == "OK"]
    rejected = [one for one in seen if one.code == "RESOURCE_EXHAUSTED"]
    rejected_s = [one.total_s for one in rejected] or [0.0]
    return Level(
        load=load,
        offered_per_s=len(ended) / span_s,
        served_per_s=len(served) / span_s,
        goodput_per_s=sum((one.ttft_s or 0.0) <= MAX_TTFT_S for one in served) / span_s,
        rejected_per_s=sum(one.code == "RESOURCE_EXHAUSTED" for one in ended) / span_s,
        rejection_p50_ms=percentile_ms(rejected_s, 50),
        rejection_p99_ms=percentile_ms(rejected_s, 99),
        health_p99_ms=percentile_ms(probe.took_s, 99),
        health_max_ms=percentile_ms(probe.took_s, 100),
        client_lag_p99_ms=percentile_ms(probe.lag_s or [0.0], 99),
        num_without_retry_time=sum(not one.has_retry_time for one in rejected),
        num_not_serving=probe.num_not_serving,
        num_other_ends=sum(one.code not in ("OK", "RESOURCE_EXHAUSTED") for one in seen),
    )


def measure(options: Namespace) -> Outcome:
    """Run all loads one after the other on one service."""
    duration_s = 20.0 if options.full else 5.0
    sizes = (
        *(*simulated(STEP_S), *MEASURED, "--max-num-seqs", str(NUM_SLOTS)),
        *("--max-num-waiting", str(MAX_WAITING), "--max-seq-len", "128", "--block-size", "64"),
        *("--num-blocks", str(NUM_SLOTS * 4), "--pipeline-depth", "2"),
    )
    with service(*sizes, num_fronts=options.fronts) as found:
        asyncio.run(offer_load(found.address, 0.5 * PEAK_PER_S, 1.5))  # warm-up
        levels = [
            asyncio.run(offer_load(found.address, load * PEAK_PER_S, duration_s)) for load in LOADS
        ]
    title = f"{NUM_SLOTS} slots, steps of {STEP_S * 1e3:.0f} ms, a queue of {MAX_WAITING}"
    print_rows(title, levels)
    if options.picture is not None:
        draw(levels, options.picture)
    return levels, checks_of(levels)


def checks_of(levels: list[Level]) -> list[Check]:
    """Return the checks of goodput and rejections against their goals."""
    by_load = {round(level.load, 6): level for level in levels}
    peak = max(level.goodput_per_s for level in levels)
    most = by_load[max(by_load)]
    overloaded = [level for level in levels if level.load > 1.0]
    is_quiet = max(level.client_lag_p99_ms for level in overloaded) <= MAX_LAG_MS
    health_ms = max(level.health_p99_ms for level in overloaded)
    counts = (
        ("health checks that were not SERVING", sum(level.num_not_serving for level in levels)),
        ("rejections without a retry time", sum(level.num_without_retry_time for level in levels)),
        ("other ends than served and rejected", sum(level.num_other_ends for level in levels)),
    )
    return [
        at_least("goodput at 2x, of the peak", by_load[2.0].goodput_per_s / peak, 0.95, "share"),
        at_least("goodput at 5x, of the peak", most.goodput_per_s / peak, 0.90, "share"),
        at_least("peak, of what the executor can do", peak / PEAK_PER_S, 0.90, "share"),
        *(
            at_most(name, value_ms, goal_ms, "ms", is_settled=is_quiet or value_ms <= goal_ms)
            for name, value_ms, goal_ms in (
                ("p99 of a rejection at 5x", most.rejection_p99_ms, 5.0),
                ("p99 of a health check", health_ms, 50.0),
            )
        ),
        *(at_most(name, count, 0.0, "of all") for name, count in counts),
    ]


def draw(levels: list[Level], path: Path) -> None:
    """Draw the goodput curve as SVG."""
    loads = np.array([level.load * PEAK_PER_S for level in levels])
    names = (
        ("offered", [level.offered_per_s for level in levels]),
        ("served in time", [level.goodput_per_s for level in levels]),
        ("rejected", [level.rejected_per_s for level in levels]),
    )
    chart = Chart(
        name="overload",
        title="Goodput under overload",
        x_label="requests offered per second",
        y_label="requests per second",
        series=tuple(Series(name=name, x=loads, y=np.array(values)) for name, values in names),
        has_marks=True,
    )
    path.write_text(svg(chart), encoding="utf-8")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the curve as SVG")
    parser.add_argument("--fronts", type=int, default=1, help="front processes (default: 1)")
    run(parser, measure)


if __name__ == "__main__":
    main()
