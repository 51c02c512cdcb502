"""The site builds without warnings and without network access, and its pages load nothing from
other hosts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urldefrag

import pytest

from penstock import client
from support.pages import REPOSITORY

for needed in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(needed, reason="needs the extra docs: pip install '.[docs]'")
pytestmark = pytest.mark.docs

# References that a browser loads by itself, unlike links.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?([^\"'\s>]+)"
    r"|<link[^>]*\shref=[\"']?([^\"'\s>]+)"
)
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
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages_of(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    docs = REPOSITORY / "docs"
    expected = {
        page.relative_to(docs).with_suffix(".html").as_posix() for page in docs.rglob("*.md")
    }

    assert expected <= {page.relative_to(site).as_posix() for page in pages_of(site)}
    assert (site / "repository" / "clients" / "index.html").is_file()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
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


def test_the_client_reference_is_generated_from_docstrings(site: Path) -> None:
    page = (site / "python-client.html").read_text(encoding="utf-8")

    shown = set(re.findall(r'id="penstock\.client\.(?:errors\.)?(\w+)"', page))

    assert set(client.__all__) - shown == set()
    assert ":::" not in page
