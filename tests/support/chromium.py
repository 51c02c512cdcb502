"""Loads a page in headless Chromium and returns its document after its scripts have run.

The browser runs in virtual time: its clock skips the page's waits, so that minutes of waiting take
only seconds.
"""

import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from support.timeout import TEST_TIMEOUT_S

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
class LoadedPage:
    """A loaded page. `document`: its HTML. `console`: messages of scripts and the browser."""

    document: str
    console: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(_Reader(self.document).words)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in _Reader(self.document).elements if name == tag]

    def by_id(self, name: str) -> dict[str, str | None]:
        elements = _Reader(self.document).elements
        (found,) = (attributes for _, attributes in elements if attributes.get("id") == name)
        return found


class _Reader(HTMLParser):
    def __init__(self, document: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())


def loaded_page(url: str, home: Path, *, seconds: int) -> LoadedPage:
    """Load `url`, and return the page after `seconds` on the browser's clock. `home`: an empty
    folder for the browser's profile.
    """
    command = [
        str(EXECUTABLE),
        *OPTIONS,
        "--enable-logging=stderr",
        "--log-level=0",
        f"--user-data-dir={home}",
        f"--virtual-time-budget={1000 * seconds}",
        "--dump-dom",
        url,
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S,
        check=True,
        encoding="utf-8",
    )
    console = tuple(line for line in run.stderr.splitlines() if "CONSOLE" in line)
    return LoadedPage(document=run.stdout, console=console)
