"""The results of the delivery benchmark: medians, ratios, tables and checks.

Contains pure functions only; `delivery_cells.py` runs the cells.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Literal, TypeAlias

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
from penstock.tools.charts import Chart
from report import Check, at_least, at_most
from report_page import lines

MAX_FOREIGN_CORES = 0.3
BASE: Load = (256, 20.0)
BUSY: Load = (256, 5.0)
OVERLOAD: Load = (256, 2.5)
MANY: Load = (1000, 20.0)
"""Loads: for the ratios; a load at which one message per token is too much; twice that load; many
streams.
"""
HEADER = (
    *("streams", "step ms", "side", "us/token", "us/message", "R1", "R2", "R3", "tokens/s"),
    *("delivered", "tokens/core s", "p50 ms", "p99 ms", "p99 strict", "engine us", "runs"),
)
MIN_RUNS = 3
"""Minimum number of runs of a server, or of common rounds of a ratio, for a verdict."""
Goal: TypeAlias = tuple[Literal["at most", "at least"], float]
_YARDSTICKS = (LINES, CORE, AIO)
_COLUMNS = (
    *("server_us", "message_us", "tokens_per_s", "delivered", "per_core"),
    *("delay_p50_ms", "delay_p99_ms", "strict_p99_ms", "engine_us"),
)


class Results:
    """The results by load and server. Runs disturbed by other processes are ignored, unless all
    were.
    """

    def __init__(self, seen: Iterable[Seen]) -> None:
        self._seen: dict[tuple[Load, str], list[Seen]] = {}
        for each in seen:
            self._seen.setdefault((each.cell.load, each.cell.side), []).append(each)

    def runs(self, load: Load, side: str) -> list[Seen]:
        """Return the runs that are used."""
        its = self._seen.get((load, side), [])
        return [seen for seen in its if _noise(seen) <= MAX_FOREIGN_CORES] or its

    def median(self, load: Load, side: str, figure: str) -> float | None:
        """Return the median of an attribute of `Seen`; None if nothing was measured."""
        runs = self.runs(load, side)
        return statistics.median(getattr(seen, figure) for seen in runs) if runs else None

    def ratio(self, load: Load, side: str, other: str, figure: str = "server_us") -> float | None:
        """Return the median over the rounds of the ratio of one server to the other within a round.

        The machine's speed changes from minute to minute, so only runs of the same round are
        compared.
        """
        pairs = self.pairs(load, side, other)
        ratios = [
            getattr(mine, figure) / getattr(yardstick, figure)
            for mine, yardstick in pairs
            if getattr(yardstick, figure)
        ]
        return statistics.median(ratios) if ratios else None

    def pairs(self, load: Load, side: str, other: str) -> list[tuple[Seen, Seen]]:
        """Return the runs of both servers by round; only undisturbed rounds, if there are any."""
        others = {seen.cell.round_index: seen for seen in self._seen.get((load, other), [])}
        pairs = [
            (mine, others[mine.cell.round_index])
            for mine in self._seen.get((load, side), [])
            if mine.cell.round_index in others
        ]
        quiet = [pair for pair in pairs if max(_noise(seen) for seen in pair) <= MAX_FOREIGN_CORES]
        return quiet or pairs


def _noise(seen: Seen) -> float:
    return seen.foreign_cores


def rows_of(results: Results, grid: Mapping[Load, Iterable[str]]) -> list[list[object]]:
    """Return the table, one row for each load and server."""
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
    """Return the maximum tokens/s that each server delivered at any load, with the cores used and
    the load.
    """
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
    """Return the checks; figures that were not measured are left out."""
    found: list[Check] = []

    def add(name: str, value: float | None, goal: Goal, unit: str, num_runs: int) -> None:
        if value is not None:
            judge = at_most if goal[0] == "at most" else at_least
            is_settled = num_runs >= MIN_RUNS
            found.append(judge(name, value, goal[1], unit, is_settled=is_settled))

    def ratio(name: str, load: Load, sides: tuple[str, str], figure: str, goal: Goal) -> None:
        value = results.ratio(load, *sides, figure)
        add(name, value, goal, "x", len(results.pairs(load, *sides)))

    def median(name: str, load: Load, side: str, figure: str, goal: Goal, unit: str) -> None:
        add(name, results.median(load, side, figure), goal, unit, len(results.runs(load, side)))

    generate, multiplex = f"{GENERATE}, ", f"{MULTIPLEX}, "
    name = f"{generate}256 x 20 ms: CPU per message over grpc.aio"
    ratio(name, BASE, (GENERATE, AIO), "message_us", ("at most", 1.25))
    for load, min_share, max_p99_ms in (
        (BASE, 0.99, 20.0),
        (BUSY, 0.99, 40.0),
        (OVERLOAD, 0.95, 100.0),
    ):
        name = f"{generate}{load[0]} x {load[1]:g} ms: "
        share: Goal = ("at least", min_share)
        median(f"{name}delivered", load, GENERATE, "delivered", share, "share")
        limit: Goal = ("at most", max_p99_ms)
        median(f"{name}p99 delay", load, GENERATE, "delay_p99_ms", limit, "ms")
    name = "two fronts, 256 x 5 ms: CPU per message over one front"
    ratio(name, BUSY, (TWO_FRONTS, GENERATE), "message_us", ("at most", 1.2))
    for load in (BASE, BUSY):
        name = f"{multiplex}{load[0]} x {load[1]:g} ms: CPU per token"
        median(name, load, MULTIPLEX, "server_us", ("at most", 4.0), "us")
    name = f"{multiplex}256 x 20 ms: tokens per core over grpc.aio"
    ratio(name, BASE, (MULTIPLEX, AIO), "per_core", ("at least", 6.0))
    name = f"{multiplex}256 x 20 ms: CPU per token over C++ gRPC"
    ratio(name, BASE, (MULTIPLEX, CORE), "server_us", ("at most", 2.0))
    for side in (GENERATE, MULTIPLEX):
        name = f"{side}, 1,000 streams, 20 ms: delivered"
        median(name, MANY, side, "delivered", ("at least", 0.99), "share")
    name = f"engine process, {engine.num_streams} streams: link and events per token"
    # A median over many steps, not over runs.
    add(name, engine.delivery_us, ("at most", 1.0), "us", MIN_RUNS)
    return found


def charts_of(seen: Iterable[Seen]) -> list[Chart]:
    """Return charts of CPU time and p99 delay by number of streams, with one line per server.

    Two charts for each step time that was measured with more than one number of streams.
    """
    runs = list(seen)
    charts: list[Chart] = []
    for step_ms in sorted({each.cell.step_ms for each in runs}, reverse=True):
        its = [each for each in runs if each.cell.step_ms == step_ms]
        if len({each.cell.num_streams for each in its}) < 2:
            continue
        for name, title, unit, figure in (
            ("cpu", "Server CPU", "us per token", "server_us"),
            ("p99", "p99 delay", "ms", "delay_p99_ms"),
        ):
            charts.append(
                Chart(
                    name=f"{name}_{step_ms:g}",
                    title=f"{title}, steps of {step_ms:g} ms",
                    x_label="streams",
                    y_label=unit,
                    series=lines(
                        its,
                        SIDES,
                        lambda each: each.cell.side,
                        lambda each: each.cell.num_streams,
                        attrgetter(figure),
                    ),
                    has_marks=True,
                )
            )
    return charts
