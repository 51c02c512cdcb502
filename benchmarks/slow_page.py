"""What runs said, in the page about them: the text between its marks.

Owns the form of it: a table of clients' figures and answers of Prometheus, and the summary of the
flight recording. The page's own words are left as they are. Pure but for the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picture_svg import seconds
from slow_cases import Case
from slow_load import Answer, figures_of

_NOTHING = 5e-4
MARK, MARK_END = "<!-- run: {} -->", "<!-- end of run -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a case's runs said, the first one first; `summary`: of `penstock timeline`;
    `log`: lines worth showing."""

    case: Case
    answers: Sequence[Sequence[Answer]]
    values: Sequence[Mapping[str, Mapping[str, float]]]
    summary: str
    log: str = ""


def block(told: Told) -> str:
    """Markdown that tells it."""
    case = told.case
    names = ["before", *([f"with {case.cured}"] if len(told.answers) > 1 else [])]
    lines = [f"| source | figure | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for group in case.groups:
        figures = [figures_of(answers, group) for answers in told.answers]
        for row in figures[0]:
            cells = [each[row] for each in figures]
            if any(cell != "-" for cell in cells):
                lines.append(f"| clients `{group}*` | {row} | {' | '.join(cells)} |")
    for query, unit in case.queries.items():
        cells = [answer_of(values[query], unit) for values in told.values]
        lines.append(
            f"| Prometheus | `{query.replace('|', chr(92) + '|')}` | {' | '.join(cells)} |"
        )
    if told.log:
        lines += ["", "```", *told.log.splitlines(), "```"]
    return "\n".join((*lines, "", "```", *told.summary.splitlines(), "```"))


def answer_of(values: Mapping[str, float], unit: str) -> str:
    """An answer of Prometheus in a cell; what is nothing is left out of many."""
    told = {
        labels: value for labels, value in values.items() if len(values) == 1 or value > _NOTHING
    }
    return ", ".join(f"{labels} {_number(value, unit)}".strip() for labels, value in told.items()
                     ) or "0"  # fmt: skip


def with_told(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of `name`. Raises ValueError without them."""
    mark = MARK.format(name)
    before, found, rest = page.partition(mark)
    _, end, after = rest.partition(MARK_END)
    if not found or not end:
        raise ValueError(f"the page lacks {mark} or {MARK_END} after it")
    return f"{before}{mark}\n\n{text}\n\n{MARK_END}{after}"


def write_told(path: Path, told: Told) -> None:
    """Replace it in the file. Raises OSError and ValueError."""
    page = path.read_text(encoding="utf-8")
    path.write_text(with_told(page, told.case.name, block(told)), encoding="utf-8")


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "s":
        return seconds(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
