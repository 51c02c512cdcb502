"""Writes the table of failures in docs/figures.md from the results of survival.py.

    python benchmarks/survival_table.py FILE.json [docs/figures.md]

Prints the table; with a page, writes it there between the two marks instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from report import cell
from usage import tell_usage

BEGIN = "<!-- survival: begin (benchmarks/survival_table.py) -->"
END = "<!-- survival: end -->"
_HEADER = ("| what happens | measured | goal |", "|---|---|---|")


def rows_of(document: dict[str, Any]) -> list[str]:
    """One row for each check, as measured; a missed goal is marked."""
    rows: list[str] = []
    for check in document["checks"]:
        unit = f" {check['unit']}" if check["unit"] else ""
        value = f"{_number(check['value'])}{unit}"
        notes = {True: "", False: " (missed)", None: " (too few runs to say)"}
        goal = f"{check['sense']} {_number(check['goal'])}{unit}"
        rows.append(f"| {check['name']} | {value}{notes[check['holds']]} | {goal} |")
    return rows


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else cell(float(value))


def table_of(document: dict[str, Any]) -> str:
    """The whole table, without a trailing newline."""
    return "\n".join((*_HEADER, *rows_of(document)))


def placed(text: str, table: str) -> str:
    """Return `text` with the table between the marks. Raises ValueError unless each mark occurs
    once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"there must be one {BEGIN!r} and, after it, one {END!r}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    tell_usage(__doc__, num_arguments=1)
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
