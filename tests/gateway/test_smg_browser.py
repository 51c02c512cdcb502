"""The page of clients/browser in headless Chromium: tokens stream through the real gateway."""

from __future__ import annotations

import asyncio
import functools
import threading
import urllib.parse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.chromium import EXECUTABLE, Left
from support.gateway import gateway
from support.live_browser import Browser, live_browser
from support.observation import model_of, observed, until_stats
from support.service import simulated

pytestmark = pytest.mark.browser
PAGES = Path(__file__).parents[2] / "clients" / "browser"
NUM_TOKENS = 12
GREETING = "Good day & <b>welcome</b>"
IS_OVER = "['done', 'stopped', 'failed'].includes(document.body.dataset.state)"


@contextmanager
def static_server() -> Generator[str]:
    """The folder of the page over HTTP; its origin."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(PAGES)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_page_streams_tokens_and_stops_them(tmp_path: Path) -> None:
    if not EXECUTABLE.exists():
        pytest.skip("Chromium is not installed")
    with static_server() as origin, live_browser(tmp_path / "home") as browser:
        async with (
            observed(*simulated(), "--facade", "smg", "--fronts", "1") as (worker, operations),
            gateway(worker.address, arguments=("--cors-allowed-origins", origin)) as made,
        ):
            visit = functools.partial(visited, browser, origin, made.url)

            done = await asyncio.to_thread(visit, str(NUM_TOKENS), IS_OVER)
            refused = await asyncio.to_thread(visit, str(NUM_TOKENS), IS_OVER, "other")
            stopped = await asyncio.to_thread(stop_under_way, visit)
            # 900 steps take nine seconds.
            async with asyncio.timeout(6):
                await until_stats(operations, lambda stats: not model_of(stats).num_processing)

    output = done.by_id("output")
    assert done.attributes("body")[0]["data-state"] == "done", done.text
    assert output["data-tokens"] == str(NUM_TOKENS)
    # One for each step of the engine: nothing on the way waits for the end.
    assert int(output["data-chunks"] or 0) >= NUM_TOKENS // 2
    assert f"{NUM_TOKENS} tokens (length)" in done.text
    assert refused.attributes("body")[0]["data-state"] == "failed"
    assert "404" in refused.text
    assert stopped.attributes("body")[0]["data-state"] == "stopped"
    assert 0 < int(stopped.by_id("output")["data-tokens"] or 0) < 900


def visited(
    browser: Browser, origin: str, to: str, max_tokens: str, until: str, model: str = "demo"
) -> Left:
    """The page after it has sent its prompt, as soon as `until` holds."""
    asked = {"gateway": to, "prompt": GREETING, "max_tokens": max_tokens, "model": model}
    page = browser.open(f"{origin}/?{urllib.parse.urlencode(asked)}")
    page.until(until)
    if until is not IS_OVER:
        page.evaluate("document.getElementById('stop').click()")
        page.until(IS_OVER)
    return page.left()


def stop_under_way(visit: Callable[[str, str], Left]) -> Left:
    """The page whose Stop is pressed after some text."""
    return visit("900", "document.getElementById('output').textContent.length > 10")
