"""Links of the repository become links of the site."""

from __future__ import annotations

import pytest

from site_hooks import (
    PICTURES,
    as_github_reads_it,
    for_site,
    linked_file,
    site_place,
    with_pictures,
)
from support.pages import REPOSITORY


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("docs/survival.md", "[a](security.md#x)", "[a](security.md#x)"),
        ("docs/survival.md", "[a](../clients/README.md)", "[a](repository/clients/README.md)"),
        ("docs/concepts/life.md", "[a](../survival.md)", "[a](../survival.md)"),
        ("docs/concepts/life.md", "[a](../../protos/)", "[a](../repository/protos/README.md)"),
        ("clients/README.md", "[a](../docs/sessions.md)", "[a](../../sessions.md)"),
        ("clients/README.md", "[a](#pool)", "[a](#pool)"),
        ("README.md", "[a](docs/bench.md)", "[a](../bench.md)"),
        ("README.md", "[a](tests/)", "a"),
        ("docs/index.md", "[a](http://127.0.0.1:50053/)", "[a](http://127.0.0.1:50053/)"),
        ("docs/index.md", "![a](pictures/life.svg)", "![a](pictures/life.svg)"),
    ],
)
def test_a_link_leads_to_the_same_file_on_the_site(path: str, link: str, expected: str) -> None:
    assert for_site(path, link) == expected


def test_a_link_out_of_the_repository_is_none() -> None:
    assert linked_file("docs/index.md", "../../elsewhere.md") is None


def test_places_do_not_meet() -> None:
    assert site_place("docs/index.md") == "index.md"
    assert site_place("README.md") == "repository/README.md"


@pytest.mark.parametrize("path", PICTURES)
def test_a_diagram_becomes_its_picture(path: str) -> None:
    page = with_pictures(path, (REPOSITORY / path).read_text(encoding="utf-8"))

    assert "mermaid" not in page
    assert f"({for_site(path, f'[x]({linked(path)})')[4:-1]})" in for_site(path, page)


def linked(path: str) -> str:
    return f"{'../' * path.count('/')}{PICTURES[path]}"


def test_a_diagram_without_a_picture_stops_the_build() -> None:
    with pytest.raises(ValueError, match=r"docs/x\.md, line 2"):
        with_pictures("docs/x.md", "```mermaid\na\n```\n")


def test_what_github_takes_is_written_out() -> None:
    page = "Why:\n- a\n  b\n- c\n\n```sh test\nls\n- no\n```"

    assert as_github_reads_it(page) == "Why:\n\n- a\n  b\n- c\n\n```sh\nls\n- no\n```"
