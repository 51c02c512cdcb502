"""Runs a benchmark: reads its options, prints progress, tables and checks, and writes JSON.

A benchmark passes a function that measures to `run`, or one for each of its parts to `run_parts`. A
check compares a figure with its goal. A missed goal is reported, but is not an error.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from penstock.server.cli.report import table_lines

Sense = Literal["at most", "at least"]
_Row = TypeVar("_Row")


class RunFailed(Exception):
    """A measurement failed; the message is the reason, such as the output of its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure and its goal: `value` should be "at least" or "at most" `goal` (see `sense`).

    `is_settled`: there are enough measurements to decide whether the goal is met.
    """

    name: str
    value: float
    goal: float
    unit: str
    sense: Sense
    is_settled: bool = True

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None if there are too few measurements."""
        if not self.is_settled:
            return None
        return self.value <= self.goal if self.sense == "at most" else self.value >= self.goal

    @property
    def row(self) -> tuple[object, ...]:
        """The cells of the check's table row: name, value, goal, unit, whether the goal is met."""
        holds = {True: "yes", False: "NO", None: "too few runs"}[self.holds]
        return (self.name, self.value, f"{self.sense} {cell(self.goal)}", self.unit, holds)


Outcome: TypeAlias = tuple[Any, Sequence[Check]]
"""The results of a measurement (JSON values and dataclasses) and its checks."""
Measure: TypeAlias = Callable[[argparse.Namespace], Outcome]


def at_most(
    name: str, value: float, goal: float, unit: str = "", *, is_settled: bool = True
) -> Check:
    """Return the check that a figure is at most `goal`."""
    return Check(
        name=name, value=value, goal=goal, unit=unit, sense="at most", is_settled=is_settled
    )


def at_least(
    name: str, value: float, goal: float, unit: str = "", *, is_settled: bool = True
) -> Check:
    """Return the check that a figure is at least `goal`."""
    return Check(
        name=name, value=value, goal=goal, unit=unit, sense="at least", is_settled=is_settled
    )


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; `doc`: the docstring of the benchmark's
    module, printed as help.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw results and checks")
    parser.add_argument("--full", action="store_true", help="the long run instead of the quick one")
    return parser


def run(parser: argparse.ArgumentParser, measure: Measure) -> None:
    """Measure, print the checks, and write results and checks as JSON if the options request it.

    Exits with the message if the measurement failed.
    """
    options = parser.parse_args()
    try:
        results, checks = measure(options)
    except RunFailed as error:
        raise SystemExit(f"{parser.prog}: {error}") from None
    print_checks(checks)
    write_json(options.json, results, checks)


def run_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Measure]) -> None:
    """Measure the parts that `--part` names, by default all of them, then print their checks.

    If the options request JSON, it is written again after each part; its results are an object with
    one key per part. If a part fails, the other parts are still measured, and the process exits
    with 1.
    """
    parser.add_argument(
        "--part", action="append", choices=tuple(parts), help="only this part; repeatable"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    checks: list[Check] = []
    failed: dict[str, str] = {}
    for name in options.part or parts:
        progress(f"part {name}")
        try:
            results[name], found = parts[name](options)
        except RunFailed as error:
            failed[name] = str(error)
            continue
        checks += found
        write_json(options.json, results, checks)
    print_checks(checks)
    for name, why in failed.items():
        print(f"\nnot measured: {name}: {why}")
    if failed:
        raise SystemExit(1)


def progress(text: str) -> None:
    """Print `text`, a description of the current activity, to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with right-aligned columns; values are formatted by `cell`."""
    cells = [[cell(value) for value in row] for row in rows]
    print("\n".join(["", title, *table_lines([header, *cells], str.rjust)]))


def print_rows(title: str, rows: Sequence[Any], *columns: str) -> None:
    """Print a table of dataclasses or mappings, one row each; print nothing without rows.

    `columns`: names of fields or properties; "a.b" is the field b of the field a. Default: all
    fields.
    """
    if not rows:
        return
    first = rows[0]
    if isinstance(first, Mapping):
        names = columns or tuple(str(name) for name in first)
        cells = [[row[name] for name in names] for row in rows]
    else:
        names = columns or tuple(field.name for field in fields(first))
        cells = [[attrgetter(name)(row) for name in names] for row in rows]
    header = [name.rpartition(".")[2].replace("_", " ") for name in names]
    print_table(title, header, cells)


def print_checks(checks: Sequence[Check]) -> None:
    """Print a table of all figures and goals, and whether the goals are met."""
    print_table(
        "Checks", ("name", "value", "goal", "unit", "holds"), [check.row for check in checks]
    )


def write_json(path: Path | None, results: Any, checks: Sequence[Check]) -> None:
    """Write results and checks to `path`; do nothing if it is None."""
    if path is None:
        return
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    check_rows = [{**asdict(check), "holds": check.holds} for check in checks]
    document = {"machine": machine, "results": results, "checks": check_rows}
    path.write_text(json.dumps(document, indent=2, default=_plain) + "\n", encoding="utf-8")
    progress(f"written: {path}")


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent: dataclasses to dicts, arrays to lists, others to
    strings.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def cell(value: object) -> str:
    """Format a value: floats below 100 with three significant digits, other floats as integers;
    None as "-", and other values with `str`.
    """
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def percentile_ms(seconds: Collection[float], percent: float) -> float:
    """Return a percentile of durations in milliseconds; NaN without values."""
    return float(np.percentile(list(seconds), percent)) * 1e3 if len(seconds) else math.nan


def medians(runs: Iterable[_Row], *keys: str) -> list[_Row]:
    """Return one row for each combination of `keys`, in the order of their first runs.

    `runs`: dataclasses. A number of a row is the median over the runs with these keys; any other
    field is taken from the first of these runs.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for one in runs:
        groups.setdefault(tuple(getattr(one, key) for key in keys), []).append(one)
    return [_median_of(its, keys) for its in groups.values()]


def _median_of(runs: Sequence[Any], keys: Collection[str]) -> Any:
    first = runs[0]
    values = {
        field.name: statistics.median(getattr(one, field.name) for one in runs)
        for field in fields(first)
        if field.name not in keys and type(getattr(first, field.name)) in (int, float)
    }
    return replace(first, **values)


def over(runs: Sequence[Any], base: Sequence[Any], figure: str) -> float:
    """Divide a figure of `runs` by the same figure of `base` in each round; return the median of
    the ratios. The ratio is taken within a round because the machine's speed changes from minute to
    minute.
    """
    value = attrgetter(figure)
    return float(
        statistics.median(value(one) / value(other) for one, other in zip(runs, base, strict=True))
    )
