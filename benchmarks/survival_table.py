"""Writes the table of failures in docs/figures.md from the results of survival.py.

    python benchmarks/survival_table.py FILE.json [docs/figures.md]

Prints the table, or writes it into the page between the two marker comments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import cell
from usage import print_usage

BEGIN = "<!-- survival: begin (benchmarks/survival_table.py) -->"
END = "<!-- survival: end -->"
_SIGNS = {"at most": "≤", "at least": "≥"}
_HEADER = ("| what happens | measured (goal) |", "|---|---|")


def rows_of(document: dict[str, Any]) -> list[str]:
    """Return one row for each check, with the measured value; a missed goal is marked.

    Checks of one figure during several attacks share a row.
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
    """Return values with their goals, or the goal once if it is the same for all."""
    goals = {goal for _, goal in values}
    if len(goals) == 1:
        return f"{'; '.join(value for value, _ in values)} {goals.pop()}"
    return "; ".join(f"{value} {goal}" for value, goal in values)


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else cell(float(value))


def table_of(document: dict[str, Any]) -> str:
    """Return the whole table, without a trailing newline."""
    return "\n".join((*_HEADER, *rows_of(document)))


def placed(text: str, table: str) -> str:
    """Return `text` with the table between the marker comments. Raises ValueError unless each of
    these occurs once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"there must be one {BEGIN!r} and, after it, one {END!r}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    print_usage(__doc__, num_arguments=1)
    if len(sys.argv) > 3:
        raise SystemExit(__doc__)
    table = table_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if len(sys.argv) == 2:
        print(table)
        return
    page = Path(sys.argv[2])
    page.write_text(placed(page.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
