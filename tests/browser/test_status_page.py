"""The status page in headless Chromium, served by a real metrics port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.server.observe.metrics.application import status_json
from penstock.server.observe.metrics.http import MetricsServer
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.observe.operations.snapshot import OperationsError
from support.chromium import LoadedPage, loaded_page
from support.snapshots import request_view, snapshot

pytestmark = pytest.mark.browser
Status = Callable[[], bytes]


class PageHarness:
    """Serves the page with a status that the test sets. `num_asked`: number of times that the
    status was fetched.
    """

    def __init__(self, home: Path) -> None:
        self.num_asked = 0
        self.status: Status = lambda: status_json(snapshot(), ())
        self.server = MetricsServer(
            host="127.0.0.1", port=0, metrics=ServiceMetrics(model="demo"), status=self._respond
        )
        self.server.start()
        self._home = home

    def _respond(self) -> bytes:
        self.num_asked += 1
        return self.status()

    def visit(self, seconds: int) -> LoadedPage:
        return loaded_page(f"http://127.0.0.1:{self.server.port}/", self._home, seconds=seconds)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[PageHarness]:
    made = PageHarness(tmp_path)
    yield made
    made.server.close()


def test_the_page_shows_the_status_and_polls_it(harness: PageHarness) -> None:
    waiting = request_view(
        request_id="late-one", state="PENDING", phase="queue", waits_for="TOKEN_BUDGET",
        queue_position=2, tenant="borealis", age_s=0.25,
    )  # fmt: skip
    figures: dict[str, Any] = {
        "prefill_tokens_per_s": 21500.0, "decode_tokens_per_s": 7420.0, "mean_step_s": 0.0083,
        "num_prompt_tokens": 9_120_000, "num_cached_prompt_tokens": 5_400_000,
    }  # fmt: skip
    harness.status = lambda: status_json(
        snapshot(1.79e9 + harness.num_asked, num_processing=harness.num_asked, **figures),
        (request_view(age_s=2.5), waiting),
    )

    left = harness.visit(10)

    assert harness.num_asked >= 5
    assert left.attributes("body")[0]["data-connection"] == "live"
    for reported in (
        "live", "tiny", "engine up", "of 8", "for blocks", "7,420", "21,500", "8.3 ms",
        "100 blocks of 16 tokens", "40 (40 %)", "9,120,000 (59 % cached)", "7,000",
        "request-1", "acme", "decode", "2.50 s", "0af76519",
        "late-one", "borealis", "PENDING", "token budget (2 ahead)", "250 ms",
    ):  # fmt: skip
        assert reported in left.text, reported
    curves = [path["d"] or "" for path in left.attributes("path")]
    assert sum(curve.count("L") >= 3 for curve in curves) >= 8
    assert "hidden" in left.by_id("lost")
    assert "hidden" in left.by_id("no-requests")
    assert left.console == ()


def test_text_from_clients_is_escaped(harness: PageHarness) -> None:
    scripts = (
        "<script>document.title='run'</script>",
        "<img src=x onerror=\"document.title='run'\">",
        "</td></table><iframe src=javascript:parent.document.title='run'></iframe>",
    )
    views = tuple(
        request_view(request_id=hostile, tenant=hostile, trace_id=hostile, model=hostile)
        for hostile in scripts
    )
    harness.status = lambda: status_json(snapshot(model=scripts[1]), views, scripts[0])

    left = harness.visit(4)

    assert "<title>5 running, 3 waiting" in left.document
    assert [script.get("src") for script in left.attributes("script")] == ["/page.js"]
    assert left.attributes("iframe") == []
    assert {image["src"] for image in left.attributes("img")} == {"/icon.svg"}
    for hostile in scripts:
        assert hostile in left.text


def test_a_lost_service_is_shown_as_lost(harness: PageHarness) -> None:
    def go_away() -> bytes:
        if harness.num_asked == 3:
            threading.Thread(target=harness.server.close).start()
        return status_json(snapshot(), (request_view(),))

    harness.status = go_away

    left = harness.visit(15)

    assert left.attributes("body")[0]["data-connection"] == "lost"
    assert "hidden" not in left.by_id("lost")
    assert "connection lost" in left.text
    assert "The figures were received at" in left.text
    assert "request-1" in left.text


def test_the_page_recovers_when_the_service_is_back(harness: PageHarness) -> None:
    def come_back() -> bytes:
        if 2 <= harness.num_asked <= 4:
            raise OperationsError("not now")
        return status_json(snapshot(), ())

    harness.status = come_back

    left = harness.visit(12)

    assert harness.num_asked > 5
    assert left.attributes("body")[0]["data-connection"] == "live"
    assert "hidden" in left.by_id("lost")
    assert "No live requests." in left.text
    assert any("503" in line for line in left.console)


def test_the_page_shows_an_error_of_the_status(harness: PageHarness) -> None:
    harness.status = lambda: status_json(
        snapshot(is_up=False, mean_step_s=None), (), "the engine is down"
    )

    left = harness.visit(3)

    assert "engine down" in left.text
    assert "Unknown: the engine is down" in left.text
    assert "hidden" in left.by_id("no-requests")
