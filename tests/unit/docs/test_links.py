"""Every link on every page has a target: a file, a folder, a picture or a heading."""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_source import anchors, links
from support.pages import REPOSITORY, markdown_pages, page_id


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


# Pages to which the first page does not link, each with a page that links to it.
ASIDE = {
    "survival-cases.md": "survival.md",
    "tensorrt-llm-mapping.md": "tensorrt-llm.md",
    "threat-model.md": "security.md",
}


def linked_from(page: Path) -> set[Path]:
    """Return the files to which a page links; a folder counts as its README."""
    targets = (link.target.partition("#")[0] for link in links(page.read_text(encoding="utf-8")))
    files = [(page.parent / target).resolve() for target in targets if target]
    return {file / "README.md" if file.is_dir() else file for file in files}


def test_every_page_can_be_found_from_the_first() -> None:
    docs = REPOSITORY / "docs"
    first = docs / "index.md"
    found = linked_from(first)
    for name, other in ASIDE.items():
        if (docs / other).resolve() in found and docs / name in linked_from(docs / other):
            found.add(docs / name)
    clients = (REPOSITORY / "clients").glob("*/README.md")
    wanted = {*docs.glob("*.md"), *clients, REPOSITORY / "deploy" / "kubernetes" / "README.md"}

    assert len(wanted) > 30
    assert {page_id(page) for page in wanted - found - {first}} == set()


@pytest.mark.parametrize("page", markdown_pages(), ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []
