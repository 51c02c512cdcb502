"""The commands that the banner of `penstock serve` suggests."""

from __future__ import annotations

import sys

import pytest

from penstock.server.cli.serve import banner_lines
from penstock.server.processes.supervisor import ServiceReady

READY = ServiceReady(
    address="127.0.0.1:50051",
    model="demo",
    executor="simulated",
    num_fronts=1,
    start_s=1.0,
    resources="",
    has_tls=False,
    operations_address="127.0.0.1:50052",
    metrics_url=None,
)


def test_penstock_top_is_suggested_only_where_rich_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich", reason="needs the extra top")
    assert "penstock top" in "\n".join(banner_lines(READY))
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "penstock top" not in "\n".join(banner_lines(READY))
