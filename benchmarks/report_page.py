"""Writes the result of a benchmark as one self-contained HTML page.

The page contains settings, checks, tables and charts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.tools.charts import Chart, Series, svg
from penstock.tools.pages import html_table, page
from report import CHECK_HEADER, Check, cell

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the page. `note`: an explanation below the title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""

    @property
    def html(self) -> str:
        """Return the table as a section of a page."""
        cells = [[cell(value) for value in row] for row in self.rows]
        note = f"<p>{self.note}</p>" if self.note else ""
        return f"<h2>{self.title}</h2>{note}{html_table(self.header, cells)}"


def table_of(
    title: str,
    note: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Callable[[Mapping[str, Any]], object]],
) -> Table:
    """Return a table with one row for each of `rows`; `columns` compute its cells."""
    cells = [[column(row) for column in columns.values()] for row in rows]
    return Table(title=title, header=tuple(columns), rows=cells, note=note)


def write_page(
    path: Path,
    title: str,
    tables: Sequence[Table],
    charts: Sequence[Chart],
    checks: Sequence[Check],
    settings: str = "",
) -> None:
    """Write the page; charts follow the first table. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    goals = Table(title="Goals", header=CHECK_HEADER, rows=[check.row for check in checks])
    first, *others = [table.html for table in tables]
    sections = [f"<p>{escape(settings)}</p>", goals.html, first, *map(svg, charts), *others]
    path.write_text(page(title, sections), encoding="utf-8")
    print(f"\nwritten: {path}")


def lines(
    rows: Iterable[_Row],
    names: Sequence[str],
    name: Callable[[_Row], str],
    x: Callable[[_Row], float],
    y: Callable[[_Row], float],
) -> tuple[Series, ...]:
    """Return one line per name in `names` that has rows; the y of several rows with the same x is
    their median.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(name(row), {}).setdefault(x(row), []).append(y(row))
    return tuple(
        Series(
            name=each,
            x=np.array(sorted(found[each]), dtype=np.float64),
            y=np.array(
                [statistics.median(found[each][at]) for at in sorted(found[each])],
                dtype=np.float64,
            ),
        )
        for each in names
        if each in found
    )
