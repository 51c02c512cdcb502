"""How every benchmark tells its result: a table for people, JSON with checks for programs.

Owns the format only. A check is one figure against its goal, told as measured, a miss included.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure: `value` in `unit` is to be at least or at most `goal`.

    `is_settled`: enough was measured to say whether it holds.
    """

    name: str
    value: float
    goal: float
    unit: str
    sense: Literal["at most", "at least"]
    is_settled: bool = True

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where too little was measured."""
        if not self.is_settled:
            return None
        return self.value <= self.goal if self.sense == "at most" else self.value >= self.goal


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw results and checks")
    parser.add_argument("--full", action="store_true", help="the long run instead of the quick one")
    return parser


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns; numbers to the right, floats with three significant digits."""
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    print(f"\n{title}")
    print("  ".join(name.rjust(width) for name, width in zip(header, widths, strict=True)))
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_checks(checks: Sequence[Check]) -> None:
    """Print every figure against its goal."""
    rows = [(c.name, c.value, f"{c.sense} {cell(c.goal)}", c.unit, verdict(c)) for c in checks]
    print_table("Checks", ("name", "value", "goal", "unit", "holds"), rows)


def verdict(check: Check) -> str:
    """Whether it holds, in a word or two."""
    return {True: "yes", False: "NO", None: "too few runs"}[check.holds]


def write_json(path: Path | None, results: Any, checks: Sequence[Check]) -> None:
    """Write results and checks to `path`; nothing when there is no path."""
    if path is None:
        return
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    told = [{**asdict(check), "holds": check.holds} for check in checks]
    document = {"machine": machine, "results": results, "checks": told}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def cell(value: object) -> str:
    """A value as text: floats with three significant digits."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
