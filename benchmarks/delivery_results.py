"""What the delivery benchmark makes of its runs: medians, ratios, tables and checks.

Pure. Does not know how a cell is run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from delivery_cells import (
    AIO,
    CORE,
    GENERATE,
    LINES,
    MULTIPLEX,
    SIDES,
    TWO_FRONTS,
    Load,
    Seen,
)
from delivery_engine import EngineCost
from report import Check

MAX_FOREIGN_CORES = 0.3
BASE: Load = (256, 20.0)
BUSY: Load = (256, 5.0)
OVERLOAD: Load = (256, 2.5)
MANY: Load = (1000, 20.0)
"""The load that ratios are told at; one at which a message per token is too much; twice that; and
many streams."""
HEADER = (
    *("streams", "step ms", "side", "us/token", "us/message", "R1", "R2", "R3", "tokens/s"),
    *("delivered", "tokens/core s", "p50 ms", "p99 ms", "p99 strict", "engine us", "runs"),
)
_YARDSTICKS = (LINES, CORE, AIO)
_COLUMNS = (
    *("server_us", "message_us", "tokens_per_s", "delivered", "per_core"),
    *("delay_p50_ms", "delay_p99_ms", "strict_p99_ms", "engine_us"),
)


class Results:
    """What was seen, by load and side. Quiet runs count, noisy ones only where all are."""

    def __init__(self, seen: Iterable[Seen]) -> None:
        self._seen: dict[tuple[Load, str], list[Seen]] = {}
        for each in seen:
            self._seen.setdefault((each.cell.load, each.cell.side), []).append(each)

    def runs(self, load: Load, side: str) -> list[Seen]:
        """Those that count."""
        its = self._seen.get((load, side), [])
        return [seen for seen in its if seen.foreign_cores <= MAX_FOREIGN_CORES] or its

    def median(self, load: Load, side: str, figure: str) -> float | None:
        """Of an attribute of `Seen`; None where nothing was measured."""
        runs = self.runs(load, side)
        return statistics.median(getattr(seen, figure) for seen in runs) if runs else None

    def ratio(self, load: Load, side: str, other: str, figure: str = "server_us") -> float | None:
        """The median of one side over that of the other."""
        mine, yardstick = self.median(load, side, figure), self.median(load, other, figure)
        return None if mine is None or not yardstick else mine / yardstick


def rows_of(results: Results, grid: Mapping[Load, Iterable[str]]) -> list[list[object]]:
    """The table, a row for each load and side."""
    rows: list[list[object]] = []
    for load, sides in grid.items():
        for side in sides:
            runs = results.runs(load, side)
            if not runs:
                continue
            medians = [results.median(load, side, column) for column in _COLUMNS]
            ratios = [results.ratio(load, side, yardstick) for yardstick in _YARDSTICKS]
            told = ["" if ratio is None else ratio for ratio in ratios]
            rows.append([*load, side, *medians[:2], *told, *medians[2:], len(runs)])
    return rows


def most_delivered(results: Results, grid: Iterable[Load]) -> list[list[object]]:
    """The most that each side delivered at any load, and with how much processor time."""
    rows: list[list[object]] = []
    loads = list(grid)
    for side in SIDES:
        rates = [(results.median(load, side, "tokens_per_s") or 0.0, load) for load in loads]
        rate, load = max(rates)
        if rate:
            cores = results.median(load, side, "server_cores")
            rows.append([side, rate, cores, f"{load[0]} x {load[1]:g} ms"])
    return rows


def checks_of(results: Results, engine: EngineCost) -> list[Check]:
    """The figures; those that were not measured are left out."""
    checks: list[Check] = []

    def add(
        name: str,
        value: float | None,
        sense: Literal["at most", "at least"],
        goal: float,
        unit: str,
    ) -> None:
        if value is not None:
            checks.append(Check(name=name, value=value, goal=goal, unit=unit, sense=sense))

    ratio, median = results.ratio, results.median
    generate, multiplex = f"{GENERATE}, ", f"{MULTIPLEX}, "
    over_aio = ratio(BASE, GENERATE, AIO, "message_us")
    add(f"{generate}256 x 20 ms: CPU per message over grpc.aio", over_aio, "at most", 1.25, "x")
    for load, min_share, max_p99_ms in (
        (BASE, 0.99, 20.0),
        (BUSY, 0.99, 40.0),
        (OVERLOAD, 0.95, 100.0),
    ):
        name = f"{generate}{load[0]} x {load[1]:g} ms: "
        add(f"{name}delivered", median(load, GENERATE, "delivered"), "at least", min_share, "share")
        p99_ms = median(load, GENERATE, "delay_p99_ms")
        add(f"{name}p99 delay", p99_ms, "at most", max_p99_ms, "ms")
    two = ratio(BUSY, TWO_FRONTS, GENERATE, "message_us")
    add("two fronts, 256 x 5 ms: CPU per message over one front", two, "at most", 1.2, "x")
    for load in (BASE, BUSY):
        cpu_us = median(load, MULTIPLEX, "server_us")
        name = f"{multiplex}{load[0]} x {load[1]:g} ms: CPU per token"
        add(name, cpu_us, "at most", 4.0, "us")
    per_core = ratio(BASE, MULTIPLEX, AIO, "per_core")
    add(f"{multiplex}256 x 20 ms: tokens per core over grpc.aio", per_core, "at least", 6.0, "x")
    over_core = ratio(BASE, MULTIPLEX, CORE)
    add(f"{multiplex}256 x 20 ms: CPU per token over C++ gRPC", over_core, "at most", 2.0, "x")
    for side in (GENERATE, MULTIPLEX):
        share = median(MANY, side, "delivered")
        add(f"{side}, 1,000 streams, 20 ms: delivered", share, "at least", 0.99, "share")
    name = f"engine process, {engine.num_streams} streams: link and events per token"
    add(name, engine.delivery_us, "at most", 1.0, "us")
    return checks
