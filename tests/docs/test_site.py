"""The site builds without warnings and network, and its pages fetch nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import pytest
import yaml

from penstock import client
from support.pages import REPOSITORY

for needed in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(needed, reason="needs the extra docs: install penstock[docs]")
pytestmark = pytest.mark.docs

# What a browser fetches by itself; where a reader may click is another matter.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?([^\"'\s>]+)"
    r"|<link[^>]*\shref=[\"']?([^\"'\s>]+)"
)
ENTRY = re.compile(r'<a href="([^"]+)" class="md-nav__link[^"]*">(.*?)</a>', re.S)
LINK = re.compile(r"<a [^>]*href=[\"']?([^\"'\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that does not answer: every network access fails.
    closed = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, **closed, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages_of(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_of_docs_is_there(site: Path) -> None:
    docs = REPOSITORY / "docs"
    expected = {
        page.relative_to(docs).with_suffix(".html").as_posix() for page in docs.rglob("*.md")
    }

    assert expected <= {page.relative_to(site).as_posix() for page in pages_of(site)}
    assert (site / "repository" / "clients" / "index.html").is_file()


def entries_of(nav: Any, label: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(nav, str):
        place = re.sub(r"(README|index)\.md$", "index.html", nav)
        yield label, re.sub(r"\.md$", ".html", place)
    for part in nav if isinstance(nav, list) else ():
        yield from entries_of(part)
    for name in nav if isinstance(nav, dict) else ():
        yield from entries_of(nav[name], name)


def test_every_entry_of_the_navigation_is_shown_by_its_name(site: Path) -> None:
    # Without what the tags of mkdocs.yml would construct.
    settings = yaml.load((REPOSITORY / "mkdocs.yml").read_text("utf-8"), Loader=yaml.BaseLoader)
    expected = set(entries_of(settings["nav"]))
    shown = {
        (" ".join(unescape(re.sub(r"<[^>]*>", " ", name)).split()), address)
        for address, name in ENTRY.findall((site / "index.html").read_text("utf-8"))
    }

    assert ("Python", "repository/clients/index.html") in expected
    assert expected - shown == set()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = {
        address
        for page in pages_of(site)
        for found in FETCHED.findall(page.read_text(encoding="utf-8"))
        for address in found
        if address
    }

    assert fetched
    assert {address for address in fetched if "//" in address} == set()


def test_links_of_the_pages_lead_to_files(site: Path) -> None:
    missing = {
        f"{page.relative_to(site)}: {address}"
        for page in pages_of(site)
        if page.name != "404.html"
        for address in LINK.findall(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:|//|#", address)
        and not (page.parent / urldefrag(address).url).exists()
    }

    assert missing == set()


def test_the_reference_of_the_client_is_made_from_its_docstrings(site: Path) -> None:
    page = (site / "python-client.html").read_text(encoding="utf-8")

    shown = set(re.findall(r'id="penstock\.client\.(?:errors\.)?(\w+)"', page))

    assert set(client.__all__) - shown == set()
    assert ":::" not in page


def test_no_block_of_code_is_left_as_text(site: Path) -> None:
    assert [page for page in pages_of(site) if "```" in page.read_text(encoding="utf-8")] == []
