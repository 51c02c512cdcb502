"""Writes the table of failures in docs/figures.md from the results of benchmarks/survival.py.

    python docs/tools/survival_table.py FILE.json

The table replaces the text between the page's two marker comments.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "figures.md"
_PLACE = re.compile(r"(?<=<!-- survival: begin -->\n\n).*(?=\n\n<!-- survival: end -->)", re.DOTALL)
_SIGNS = {"at most": "≤", "at least": "≥"}


def rows_of(document: dict[str, Any]) -> list[str]:
    """Return the rows of the table: the measured value and the goal of each check, with a note if
    the goal was missed or if there were too few runs.

    Checks whose names are the same up to the word "during" or a colon share a row.
    """
    rows: dict[str, list[tuple[str, str]]] = {}
    for check in document["checks"]:
        unit = f" {check['unit']}" if check["unit"] else ""
        notes = {True: "", False: ", missed", None: ", too few runs"}
        goal = f"({_SIGNS[check['sense']]} {_number(check['goal'])}{notes[check['holds']]})"
        group, _, what = check["name"].replace(" during ", " during: ").partition(": ")
        value = f"{what} {_number(check['value'])}{unit}".strip()
        rows.setdefault(group, []).append((value, goal))
    return [f"| {group} | {_cell(values)} |" for group, values in rows.items()]


def _cell(values: Sequence[tuple[str, str]]) -> str:
    """Return the cell of a row: each value with its goal, or the goal once if all have the same."""
    goals = {goal for _, goal in values}
    if len(goals) == 1:
        return f"{'; '.join(value for value, _ in values)} {goals.pop()}"
    return "; ".join(f"{value} {goal}" for value, goal in values)


def _number(value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def main() -> None:
    """Write the table. Raises SystemExit if the page does not have both marker comments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON of benchmarks/survival.py")
    path: Path = parser.parse_args().results
    rows = rows_of(json.loads(path.read_text(encoding="utf-8")))
    table = "\n".join(("| what happens | measured (goal) |", "|---|---|", *rows))
    text, count = _PLACE.subn(lambda _: table, PAGE.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for the table")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
