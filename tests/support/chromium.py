"""Loads a page in headless Chromium and returns its document after its scripts have run.

In virtual time: the browser's clock skips the page's waits, so minutes of it take seconds.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from support.patience import PATIENCE_S

EXECUTABLE = Path("/usr/bin/chromium")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
)


@dataclass(frozen=True)
class Left:
    """A loaded page. `document`: its HTML. `console`: messages of scripts and the browser."""

    document: str
    console: tuple[str, ...]

    @property
    def text(self) -> str:
        reader = _Reader()
        reader.feed(self.document)
        return " ".join(reader.words)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        reader = _Reader()
        reader.feed(self.document)
        return [attributes for name, attributes in reader.elements if name == tag]

    def by_id(self, name: str) -> dict[str, str | None]:
        reader = _Reader()
        reader.feed(self.document)
        (found,) = (attributes for _, attributes in reader.elements if attributes.get("id") == name)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())


def visited(url: str, home: Path, *, seconds: int) -> Left:
    """Load `url`, and return the page after `seconds` on the browser's clock. `home`: an empty
    folder for the browser's profile.
    """
    run = _run(url, home, seconds, "--dump-dom")
    console = tuple(line for line in run.stderr.splitlines() if "CONSOLE" in line)
    return Left(document=run.stdout, console=console)


def _run(url: str, home: Path, seconds: int, *wanted: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(EXECUTABLE),
        *OPTIONS,
        "--enable-logging=stderr",
        "--log-level=0",
        f"--user-data-dir={home}",
        f"--virtual-time-budget={1000 * seconds}",
        *wanted,
        url,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, encoding="utf-8"
    )
