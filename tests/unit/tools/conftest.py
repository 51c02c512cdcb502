"""Tests of commands in this process: without variables of the test run, of which commands warn."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
