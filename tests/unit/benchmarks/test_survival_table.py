"""The table of failures in docs/figures.md: each check once, misses marked, the rest unchanged."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def survival_table() -> Any:
    return importlib.import_module("survival_table")


def check(name: str, value: float, *, holds: bool | None, unit: str = "s") -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "goal": 1.0,
        "unit": unit,
        "sense": "at most",
        "holds": holds,
    }


def test_every_check_is_a_row_and_a_miss_says_so(survival_table: Any) -> None:
    checks = [
        check("requests lost", 0.0, holds=True, unit="requests"),
        check("drain", 1.25, holds=False),
        check("growth", 100_000.0, holds=None, unit=""),
    ]

    rows = survival_table.rows_of({"checks": checks})

    assert rows == [
        "| requests lost | 0 requests | at most 1 requests |",
        "| drain | 1.25 s (missed) | at most 1 s |",
        "| growth | 100,000 (too few runs to say) | at most 1 |",
    ]


def test_only_what_is_between_the_marks_is_changed(survival_table: Any) -> None:
    text = f"before\n{survival_table.BEGIN}\nold\n{survival_table.END}\nafter\n"

    placed = survival_table.placed(text, "| new |")

    assert placed.startswith(f"before\n{survival_table.BEGIN}\n")
    assert placed.endswith(f"{survival_table.END}\nafter\n")
    assert "old" not in placed
    assert survival_table.placed(placed, "| new |") == placed


@pytest.mark.parametrize("text", ["", "{b}", "{e} {b}", "{b} {b} {e}"])
def test_marks_that_are_not_there_are_an_error(text: str, survival_table: Any) -> None:
    broken = text.format(b=survival_table.BEGIN, e=survival_table.END)

    with pytest.raises(ValueError, match="there must be one"):
        survival_table.placed(broken, "")
