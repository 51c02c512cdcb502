"""The gateway's page names what is refused, and the versions that the extra allows."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import penstock.v1 as pb
from penstock.gateway.smg.service import MISSING_METHODS, SERVICE_NAME
from penstock.server.observe.metrics import labels

ROOT = Path(pb.__file__).parents[3]
PAGE = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")


def test_the_page_names_what_is_not_there() -> None:
    assert [
        method for method in (*MISSING_METHODS, "SubscribeKvEvents") if method not in PAGE
    ] == []
    for name in ("structural_tag", "truncate_prompt_tokens"):
        assert name in PAGE


def test_the_page_names_the_metric() -> None:
    assert f'method="{SERVICE_NAME}/Generate"' in PAGE
    assert f"{SERVICE_NAME}/Generate" in labels.FOREIGN_METHODS


def test_the_page_tells_the_version_that_was_tried() -> None:
    major, minor, patch = (int(part) for part in version("smg-grpc-proto").split("."))

    assert "smg-grpc-proto 0.4.28" in PAGE
    assert (major, minor) == (0, 4)
    assert patch >= 28


def test_commands_wait_no_half_minute_for_a_worker_and_reach_its_only_front() -> None:
    """By default the gateway looks for a worker that is loading every 30 s."""
    browser = (ROOT / "clients" / "browser" / "README.md").read_text(encoding="utf-8")
    for page in (PAGE, browser):
        assert "penstock serve --facade smg --fronts 1\n" in page
        assert "--worker-startup-check-interval 1" in page
