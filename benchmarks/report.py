"""The common interface of benchmarks: options, progress, tables, checks, JSON.

A check compares a figure with its goal. A missed goal is reported, it is not an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Sense = Literal["at most", "at least"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure and its goal: `value` should be at least or at most `goal`, in `unit`.

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
        """The cells of its table row: name, value, goal, unit, whether the goal is met."""
        holds = {True: "yes", False: "NO", None: "too few runs"}[self.holds]
        return (self.name, self.value, f"{self.sense} {cell(self.goal)}", self.unit, holds)


CHECK_HEADER = ("name", "value", "goal", "unit", "holds")


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
    """Return a parser with the options of every benchmark; `doc`: its module's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw results and checks")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="the long run instead of the quick one")
    size.add_argument("--quick", action="store_true", help="the quick run, with smaller numbers")
    return parser


def progress(text: str) -> None:
    """Print `text`, a description of the current activity, to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with aligned columns: numbers right-aligned, floats with three significant
    digits.
    """
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    print(f"\n{title}")
    print("  ".join(name.rjust(width) for name, width in zip(header, widths, strict=True)))
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_checks(checks: Sequence[Check]) -> None:
    """Print a table of all figures and goals."""
    print_table("Checks", CHECK_HEADER, [check.row for check in checks])


def conclude(options: argparse.Namespace, results: Any, checks: Sequence[Check]) -> None:
    """Print the checks; write results and checks as JSON if the options request it."""
    print_checks(checks)
    write_json(options.json, results, checks)


def write_json(path: Path | None, results: Any, checks: Sequence[Check]) -> None:
    """Write results and checks to `path`; do nothing if it is None."""
    if path is None:
        return
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    told = [{**asdict(check), "holds": check.holds} for check in checks]
    document = {"machine": machine, "results": results, "checks": told}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def cell(value: object) -> str:
    """Format a value: floats with three significant digits."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
