"""A page in headless Chromium, and a picture of it once it shows what is waited for.

Owns the browser process and its debugging pipe, on which messages are JSON ended by a zero byte.
Real servers answer in their own time, so the browser's clock is left alone.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

EXECUTABLE = Path("/usr/bin/chromium")
PATIENCE_S = 30.0
_POLL_S = 0.1


class BrowserFailed(Exception):
    """The browser did not do what it was asked; the message says what."""


class Page:
    """One open page. `width` and `height`: of its window."""

    def __init__(self, read_fd: int, write_fd: int, url: str, width: int, height: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._buffer = b""
        self._num = 0
        self._session = ""
        # First blank, so that its size is set when it is drawn.
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        light = [{"name": "prefers-color-scheme", "value": "light"}]
        self._ask("Emulation.setEmulatedMedia", features=light)
        self._ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is, of this page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until it is true. Raises BrowserFailed when it does not come to that."""
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s:
            if self.value(expression):
                return
            time.sleep(_POLL_S)
        raise BrowserFailed(f"it did not come to {expression}")

    def screenshot(self, *, height: int | None = None) -> bytes:
        """What the window shows, as PNG; the upper `height` of it."""
        area: dict[str, Any] = {}
        if height is not None:
            width = self.value("window.innerWidth")
            area = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png", **area)["data"])

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num += 1
        message = {"id": self._num, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s:
            answer = self._next(give_up_s)
            if answer.get("id") == self._num:
                if "error" in answer:
                    raise BrowserFailed(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
        raise BrowserFailed(f"{method}: no answer")

    def _next(self, give_up_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = max(0.0, give_up_s - time.monotonic())
            if not select.select([self._read_fd], [], [], left_s)[0]:
                raise BrowserFailed("it says nothing")
            data = os.read(self._read_fd, 65536)
            if not data:
                raise BrowserFailed("it ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextlib.contextmanager
def opened(url: str, *, width: int, height: int) -> Generator[Page]:
    """A page, and a browser of its own for it, until the block ends."""
    (down_read, down_write), (up_read, up_write) = _pipe(), _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        options = (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={home}"),
        )
        # It reads from 3 and writes to 4.
        moved = f'exec "$@" 3<&{down_read} 4>&{up_write}'
        process = subprocess.Popen(
            ("bash", "-c", moved, "bash", str(EXECUTABLE), *options),
            pass_fds=(down_read, up_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down_read)
        os.close(up_write)
        try:
            yield Page(up_read, down_write, url, width, height)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(down_write)
            os.close(up_read)


def _pipe() -> tuple[int, int]:
    """Ends of a pipe, out of the way of 3 and 4."""
    low = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in low]
    for fd in low:
        os.close(fd)
    return high[0], high[1]
