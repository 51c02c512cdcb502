"""Benchmarks are scripts that import their neighbours: here they find them."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "benchmarks")
