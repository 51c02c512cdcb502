"""Compact figures for `penstock top`: durations, counts, sparklines, shares."""

from collections.abc import Sequence

_SPARKS = "▁▂▃▄▅▆▇█"


def duration(value_s: float | None) -> str:
    """Three digits and a unit; "-" for none."""
    if value_s is None:
        return "-"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 0.01:
        return f"{value_s * 1e3:.2f} ms"
    if value_s < 1:
        return f"{value_s * 1e3:.0f} ms"
    if value_s < 10:
        return f"{value_s:.2f} s"
    return span(value_s)


def span(value_s: float) -> str:
    """A time from seconds to days, in its two largest units."""
    whole = int(value_s)
    if whole < 60:
        return f"{value_s:.1f} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def count(value: float) -> str:
    """A number with separated thousands."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars from zero to their maximum; empty for a single one."""
    shown = list(values)[-width:] if width > 0 and len(values) > 1 else []
    top = max(shown, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(shown)
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(max(0.0, value) / top * last)] for value in shown)


def cells_of(parts: Sequence[int], num_cells: int) -> list[int]:
    """How many of `num_cells` each share gets; they add up, and none is off by one.

    Where there are fewer things than cells, each has one cell.
    """
    total = sum(parts)
    num_cells = min(num_cells, total)
    if not total:
        return [0] * len(parts)
    cells: list[int] = []
    num_before = seen = 0
    for part in parts:
        seen += part
        num_until = round(seen * num_cells / total)
        cells.append(num_until - num_before)
        num_before = num_until
    return cells
