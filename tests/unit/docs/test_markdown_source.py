"""Links, anchors and blocks are found as GitHub and the site find them."""

from __future__ import annotations

import pytest

from markdown_source import anchors, blocks, heading_slug, links, prose_lines, replace_links

PAGE = """\
# A page: `code` & more

[one](a.md#x) and ![two](b.svg), `[no](c.md)`.

```sh test
[no](d.md)
# no heading
```

## Again

<a id="Here.too"></a>

## Again

- ```python
  print(1)
  ```
"""


def test_links_in_code_are_none() -> None:
    assert [(link.target, link.is_picture) for link in links(PAGE)] == [
        ("a.md#x", False),
        ("b.svg", True),
    ]


def test_blocks_have_their_words_their_text_and_their_line() -> None:
    shell, python = blocks(PAGE)

    assert (shell.info, shell.language, shell.line) == ("sh test", "sh", 6)
    assert shell.text == "[no](d.md)\n# no heading\n"
    assert (python.language, python.text) == ("python", "print(1)\n")


def test_a_block_without_end_is_told_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(blocks("a\n```sh\nb\n"))


def test_lines_stay_where_they_are_without_blocks() -> None:
    lines = prose_lines(PAGE)

    assert len(lines) == len(PAGE.splitlines())
    assert lines.index("## Again") == PAGE.splitlines().index("## Again")
    assert "# no heading" not in lines


def test_headings_of_the_same_name_are_counted() -> None:
    assert anchors(PAGE) == {"a-page-code--more", "again", "again-1", "Here.too"}


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("What's `x`?", "whats-x"),
        ("Invariants (`Engine.check_integrity`)", "invariants-enginecheck_integrity"),
        ("See [this](x.md)", "see-this"),
    ],
)
def test_slugs_are_those_of_github(heading: str, slug: str) -> None:
    assert heading_slug(heading) == slug


def test_links_are_replaced_or_taken_off_outside_of_blocks_alone() -> None:
    text = "[a](x.md) [b](y.md)\n```\n[c](x.md)\n```\n"

    changed = replace_links(text, lambda target: "z.md" if target == "x.md" else None)

    assert changed == "[a](z.md) b\n```\n[c](x.md)\n```\n"
