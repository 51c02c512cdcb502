"""Formats what reports have in common: the HTML page, tables and numbers."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, cast

from penstock.server.cli.report import table_lines

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{
  font-family: sans-serif; color: #222;
  box-sizing: border-box; margin: 2em auto; padding: 0 1.5em; max-width: 1340px;
}}
pre {{ background: #f6f6f6; padding: 1em; white-space: pre-wrap; }}
body > svg {{ width: 49%; min-width: 27em; height: auto; margin: 0.7em 0; }}
p {{ max-width: 60em; line-height: 1.4; }}
table {{ border-collapse: collapse; font-size: 90%; margin: 1em 0; }}
td, th {{ padding: 0.2em 0.7em; text-align: right; border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
<h1>{title}</h1>
{sections}
</body>
</html>
"""


def page(title: str, sections: list[str]) -> str:
    """Return a self-contained HTML page. `sections`: HTML; `title`: plain text."""
    return _PAGE.format(title=escape(title), sections="\n".join(sections))


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format text cells as a <table>."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = [f"<tr>{heads}</tr>"]
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def preformatted(text: str) -> str:
    """Format text as HTML with its lines and columns preserved."""
    return f"<pre>{escape(text)}</pre>"


def finite_or_none(value: Any) -> Any:
    """Return a copy of dicts, lists and tuples, with None instead of floats that are not finite,
    because JSON cannot represent them. Tuples become lists.
    """
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        return {key: finite_or_none(item) for key, item in items.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def seconds_text(value_s: float) -> str:
    """Format a duration: in milliseconds if it is less than 1 s, else in seconds; "-" for NaN."""
    if math.isnan(value_s):
        return "-"
    return f"{value_s * 1e3:.1f} ms" if value_s < 1.0 else f"{value_s:,.2f} s"


def share_text(value: float, num_decimals: int = 1) -> str:
    """Format a share, 1.0 for all, in per cent; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.{num_decimals}%}"


def number_text(value: float, num_decimals: int = 0) -> str:
    """Format a number; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:,.{num_decimals}f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of text cells as lines with right-aligned columns."""
    return table_lines(rows, str.rjust)
