"""Headless Chromium that a test talks to while its pages run, in real time.

Owns the browser and the pipe to it: the DevTools protocol as JSON between zero bytes. For pages
that only wait, `chromium.py` is simpler.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.chromium import EXECUTABLE, Left

PATIENCE_S = 60.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
)


class Browser:
    """`with live_browser(home) as browser`. One thread reads; calls may come from any."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def call(self, method: str, session: str = "", **params: object) -> dict[str, Any]:
        """One command; its result. Raises AssertionError with what the browser states of a
        fault."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            message: dict[str, object] = {"id": number, "method": method, "params": params}
            if session:
                message["sessionId"] = session
            self._commands.write(json.dumps(message).encode() + b"\0")
        told = answer.result(PATIENCE_S)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    def open(self, url: str) -> Page:
        """A separate page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        self.call("Page.navigate", session, url=url)
        return Page(self, session)

    def close(self) -> None:
        """Hang up: the browser ends by that."""
        self._commands.close()
        self._reader.join(PATIENCE_S)
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
    """A document that lives."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises AssertionError where it throws."""
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
        """Wait until an expression holds; looked at after every change of the document."""
        self.evaluate(
            "new Promise((resolve) => { const look = () => { try {"
            f" if ({condition}) {{ seen.disconnect(); resolve(true); }} }} catch {{ }} }};"
            " const seen = new MutationObserver(look);"
            " seen.observe(document, {subtree: true, childList: true, attributes: true});"
            " look(); })"
        )

    def left(self) -> Left:
        """The document as it is now."""
        return Left(document=self.evaluate("document.documentElement.outerHTML"), console=())


@contextlib.contextmanager
def live_browser(home: Path) -> Generator[Browser]:
    """Chromium with its files in `home`."""
    (theirs_in, commands), (answers, theirs_out) = _pipe(), _pipe()
    # It takes commands from descriptor 3 and answers on 4.
    moved = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", moved, str(EXECUTABLE), *_OPTIONS, f"--user-data-dir={home}"],
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
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pipe() -> tuple[int, int]:
    """Its ends, out of the way of 3 and 4."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]
