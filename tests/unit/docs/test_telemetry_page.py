"""docs/telemetry.md is generated from the tables of metrics and of trace attributes."""

from __future__ import annotations

from telemetry_page import PAGE, telemetry_page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == telemetry_page(), "run docs/tools/telemetry_page.py"
