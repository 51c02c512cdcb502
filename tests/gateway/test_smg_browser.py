"""The page of clients/browser in headless Chromium, which streams tokens through the
real gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import itertools
import json
import os
import subprocess
import threading
import urllib.parse
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.smg import gateway
from support.chromium import EXECUTABLE, OPTIONS, LoadedPage
from support.observation import model_of, observed, until_stats
from support.service import simulated
from support.timeout import TEST_TIMEOUT_S

# Headless Chromium, controlled by the test while its pages run in real time.


class Browser:
    """A connection to Chromium's DevTools, from `live_browser`. One thread reads the responses;
    `call` may be used from any thread.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def call(self, method: str, session: str = "", **params: object) -> dict[str, Any]:
        """Send one DevTools command; return its result. Raises AssertionError with the browser's
        message on an error.
        """
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            message: dict[str, object] = {"id": number, "method": method, "params": params}
            if session:
                message["sessionId"] = session
            self._commands.write(json.dumps(message).encode() + b"\0")
        reported = answer.result(TEST_TIMEOUT_S)
        assert "error" not in reported, reported
        result: dict[str, Any] = reported["result"]
        return result

    def open(self, url: str) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        self.call("Page.navigate", session, url=url)
        return Page(self, session)

    def close(self) -> None:
        """Close the pipe, which ends the browser."""
        self._commands.close()
        self._reader.join(TEST_TIMEOUT_S)
        self._answers.close()

    def _read(self) -> None:
        rest = b""
        while data := self._answers.read1(1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                with self._lock:
                    answer = self._waiting.pop(message.get("id", 0), None)
                if answer is not None:
                    answer.set_result(message)
        with self._lock:
            for answer in self._waiting.values():
                answer.set_exception(AssertionError("the browser is gone"))


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def evaluate(self, expression: str) -> Any:
        """Return the awaited value of a JavaScript expression. Raises AssertionError if
        it throws.
        """
        result = self._browser.call(
            "Runtime.evaluate",
            self._session,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; it is evaluated after every change of the
        document.
        """
        self.evaluate(
            "new Promise((resolve) => { const look = () => { try {"
            f" if ({condition}) {{ seen.disconnect(); resolve(true); }} }} catch {{ }} }};"
            " const seen = new MutationObserver(look);"
            " seen.observe(document, {subtree: true, childList: true, attributes: true});"
            " look(); })"
        )

    def left(self) -> LoadedPage:
        """Return the current document of the page."""
        return LoadedPage(document=self.evaluate("document.documentElement.outerHTML"), console=())


@contextlib.contextmanager
def live_browser(home: Path) -> Generator[Browser]:
    """Start Chromium with its profile in `home`."""
    (theirs_in, commands), (answers, theirs_out) = _pipe(), _pipe()
    # Chromium reads commands from descriptor 3 and writes responses to 4.
    moved = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            moved,
            str(EXECUTABLE),
            *OPTIONS,
            "--remote-debugging-pipe",
            f"--user-data-dir={home}",
        ],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    browser = Browser(commands, answers)
    try:
        yield browser
    finally:
        browser.close()
        try:
            process.wait(TEST_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe. Their descriptors are 10 or higher, because Chromium uses
    descriptors 3 and 4.
    """
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]


pytestmark = pytest.mark.browser
PAGES = Path(__file__).parents[2] / "clients" / "browser"
NUM_TOKENS = 12
GREETING = "Good day & <b>welcome</b>"


def event(delta: dict[str, str], num_tokens: int, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {"choices": [choice], "usage": {"completion_tokens": num_tokens}}
    return b"data: " + json.dumps(chunk).encode()


DELIVERED = b"".join(event({"content": "x"}, num) + b"\n\n" for num in range(1, 4))
ENDED = event({"content": "y"}, 4, "length")
STREAMS = {
    "cut": (DELIVERED, 3),
    "cut-within-an-event": (DELIVERED + b'data: {"choices": [{"del', 3),
    "done-without-a-reason": (DELIVERED + b"data: [DONE]\n\n", 3),
    "no-last-blank-line": (DELIVERED + ENDED, 4),
    "whole": (DELIVERED + ENDED + b"\n\ndata: [DONE]\n\n", 4),
}
"""Possible responses of a gateway and their numbers of tokens, by the requested model."""
IS_OVER = "['done', 'stopped', 'failed'].includes(document.body.dataset.state)"


@contextmanager
def static_server() -> Generator[str]:
    """Serve the folder of the page over HTTP; provide its origin."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            pass

        def do_POST(self) -> None:
            """Respond as a gateway does, with a scripted stream: a real gateway cannot be made to
            end a stream in these ways.
            """
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body, _ = STREAMS[asked["model"]]
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(PAGES)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with static_server() as origin:
        yield origin


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not EXECUTABLE.exists():
        pytest.skip("Chromium is not installed")
    with live_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


async def test_a_page_streams_tokens_and_stops_them(browser: Browser, origin: str) -> None:
    async with (
        observed(*simulated(), "--gateway", "smg", "--fronts", "1") as (worker, operations),
        gateway(worker.address, arguments=("--cors-allowed-origins", origin)) as made,
    ):
        visit = functools.partial(loaded_page, browser, origin, made.url)

        done = await asyncio.to_thread(visit, str(NUM_TOKENS), IS_OVER)
        rejected = await asyncio.to_thread(visit, str(NUM_TOKENS), IS_OVER, "other")
        stopped = await asyncio.to_thread(stop_under_way, visit)
        stats = await until_stats(operations, lambda stats: not model_of(stats).num_processing)
        assert model_of(stats).totals.num_completion_tokens < 900 + NUM_TOKENS

    output = done.by_id("output")
    assert done.attributes("body")[0]["data-state"] == "done", done.text
    assert output["data-tokens"] == str(NUM_TOKENS)
    # About one chunk for each engine step: no part of the path buffers the response.
    assert int(output["data-chunks"] or 0) >= NUM_TOKENS // 2
    assert f"{NUM_TOKENS} tokens (length)" in done.text
    assert rejected.attributes("body")[0]["data-state"] == "failed"
    assert "404" in rejected.text
    assert stopped.attributes("body")[0]["data-state"] == "stopped"
    assert 0 < int(stopped.by_id("output")["data-tokens"] or 0) < 900


@pytest.mark.parametrize("model", STREAMS)
def test_the_page_reports_an_incomplete_response(browser: Browser, origin: str, model: str) -> None:
    left = loaded_page(browser, origin, origin, str(NUM_TOKENS), IS_OVER, model)

    _, num_tokens = STREAMS[model]
    is_whole = num_tokens == 4
    assert left.by_id("output")["data-tokens"] == str(num_tokens)
    assert left.attributes("body")[0]["data-state"] == ("done" if is_whole else "failed")
    assert ("4 tokens (length)" if is_whole else "the stream broke off") in left.text
    assert ("xxxy" if is_whole else "xxx") in left.text.split()


def loaded_page(
    browser: Browser, origin: str, to: str, max_tokens: str, until: str, model: str = "demo"
) -> LoadedPage:
    """Open the page with a prompt that it sends at once; return the document when the response has
    ended. If `until` is not IS_OVER, press Stop once that condition holds.
    """
    asked = {"gateway": to, "prompt": GREETING, "max_tokens": max_tokens, "model": model}
    page = browser.open(f"{origin}/?{urllib.parse.urlencode(asked)}")
    page.until(until)
    if until is not IS_OVER:
        page.evaluate("document.getElementById('stop').click()")
        page.until(IS_OVER)
    return page.left()


def stop_under_way(visit: Callable[[str, str], LoadedPage]) -> LoadedPage:
    """Return the document after Stop was pressed in the middle of the text."""
    return visit("900", "document.getElementById('output').textContent.length > 10")
