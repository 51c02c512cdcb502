"""Every link on every page leads somewhere: files, folders, pictures, headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from markdown_source import anchors, links
from support.pages import REPOSITORY, markdown_pages, page_id

DECISIONS = REPOSITORY / "docs" / "decisions"


def broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for link in links(page.read_text(encoding="utf-8")):
        name, _, anchor = link.target.partition("#")
        if "://" in link.target or link.target.startswith("mailto:"):
            continue
        if link.target.startswith("/"):
            broken.append(f"{link.target}: leads out of the repository")
            continue
        file = (page.parent / name).resolve() if name else page
        if not file.is_relative_to(REPOSITORY) or not file.exists():
            broken.append(f"{link.target}: no such file")
        elif anchor and file.suffix == ".md":
            if anchor not in anchors(file.read_text(encoding="utf-8")):
                broken.append(f"{link.target}: no such heading")
        elif link.is_picture and not link.text:
            broken.append(f"{link.target}: a picture without words for those who cannot see it")
    return broken


@pytest.mark.parametrize("page", markdown_pages(), ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = REPOSITORY / "docs" / "index.md"
    copy = tmp_path / "index.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")

    assert len(broken_links(copy)) == len(list(links(page.read_text(encoding="utf-8"))))


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"^- \[(\d+)\. (.+)\]\((.+)\)$", (DECISIONS / "index.md").read_text(), re.M)
    there = {
        (page.name, page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))
        for page in DECISIONS.glob("[0-9]*.md")
    }

    assert {(name, f"{number}. {title}") for number, title, name in listed} == there


def test_every_picture_is_shown() -> None:
    shown = {
        (page.parent / link.target).resolve()
        for page in markdown_pages()
        for link in links(page.read_text(encoding="utf-8"))
    }

    assert set((REPOSITORY / "docs" / "pictures").iterdir()) <= shown
