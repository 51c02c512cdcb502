"""Finds the links, headings and fenced blocks of a Markdown text, as GitHub and mkdocs parse
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^(?P<indent> *(?:[-*] +)?)(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)$")
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
_LINK = re.compile(r"(?P<before>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^()\s]+)(?P<after>\))")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$", re.M)
_ID = re.compile(r'<a id="([^"]+)"></a>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code."""

    info: str  # text after the opening fence: "python", "sh test" or ""
    text: str
    line: int  # line number of the first line of the text, from 1

    @property
    def language(self) -> str:
        """The language: `info` up to its first space, in lower case."""
        return self.info.split()[0].lower() if self.info.split() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link or an image: its text or alternative text, and its target."""

    text: str
    target: str
    is_picture: bool


def blocks(markdown: str) -> Iterator[Block]:
    """Yield the fenced blocks, in order. Raises ValueError for a block that is not closed."""
    lines = markdown.splitlines()
    start: int | None = None
    mark = info = indent = ""
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if start is None:
            if found:
                start, mark, indent = number + 1, found["mark"], " " * len(found["indent"])
                info = found["info"].strip()
        elif found and found["mark"].startswith(mark) and not found["info"].strip():
            text = "".join(f"{inner.removeprefix(indent)}\n" for inner in lines[start:number])
            yield Block(info=info, text=text, line=start + 1)
            start = None
    if start is not None:
        raise ValueError(f"the block that begins in line {start} has no end")


def prose_lines(markdown: str) -> list[str]:
    """Return the lines of the text, with fenced blocks emptied, so that line numbers are
    preserved.
    """
    kept = markdown.splitlines()
    for block in blocks(markdown):
        first = block.line - 2
        for number in range(first, first + block.text.count("\n") + 2):
            kept[number] = ""
    return kept


def without_blocks(markdown: str) -> str:
    """Return the text with the lines of fenced blocks emptied."""
    return "\n".join(prose_lines(markdown))


def links(markdown: str) -> Iterator[Link]:
    """Yield the links and images outside of code."""
    text = INLINE_CODE.sub(lambda code: "`" * len(code.group()), without_blocks(markdown))
    for found in _LINK.finditer(text):
        yield Link(
            text=found["text"],
            target=found["target"],
            is_picture=found["before"].startswith("!"),
        )


def replace_links(markdown: str, target_of: Callable[[str], str | None]) -> str:
    """Return the text with new link targets; None removes the link and keeps its text."""
    lines = markdown.splitlines(keepends=True)
    prose = prose_lines(markdown)

    def replaced(found: re.Match[str]) -> str:
        target = target_of(found["target"])
        return found["text"] if target is None else f"{found['before']}{target}{found['after']}"

    return "".join(
        _LINK.sub(replaced, line) if prose[number] else line for number, line in enumerate(lines)
    )


def anchors(markdown: str) -> set[str]:
    """Return the targets of `#...` links: headings, as GitHub slugs them, and explicit ids."""
    names: set[str] = set(_ID.findall(markdown))
    counts: dict[str, int] = {}
    for found in _HEADING.finditer(without_blocks(markdown)):
        slug = heading_slug(found[2])
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def heading_slug(heading: str) -> str:
    """Return the anchor of a heading: lower case, no punctuation, a hyphen for each space."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
