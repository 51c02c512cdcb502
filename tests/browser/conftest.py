"""Fixtures of the browser tests, which are skipped if no browser is installed."""

from __future__ import annotations

import pytest

from support.chromium import EXECUTABLE


@pytest.fixture(autouse=True)
def needs_chromium() -> None:
    if not EXECUTABLE.exists():
        pytest.skip("Chromium is not installed")
