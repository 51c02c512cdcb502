"""Converts comments of the proto files to Markdown.

Joins the lines of paragraphs, keeps drawings (indented paragraphs) as code blocks, escapes special
characters, and links the names that have an anchor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

_CODE = re.compile(r"(`[^`]*`)")
_NAME = re.compile(r"\b[A-Z]\w*(?:\.\w+)?")
# Names such as Prompt and Tokens are also English words, so only unqualified names of two words
# become links.
_TWO_WORDS = re.compile(r"[A-Z][a-z]+[A-Z]\w*|[A-Z]+(?:_[A-Z]+)+")
_ESCAPES = str.maketrans(
    {"\\": "\\\\", "*": "\\*", "<": "&lt;", ">": "&gt;", "{": "\\{", "}": "\\}", "|": "\\|"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommentWriter:
    """Formats proto comments as Markdown; `anchors`: the names that have a link target on the
    page.
    """

    anchors: Collection[str]

    def blocks(self, comment: str) -> str:
        """Return the comment as paragraphs; a paragraph whose lines are all indented by two spaces
        or more becomes a code block.
        """
        return "\n\n".join(
            f"```text\n{_dedent(block)}\n```" if _is_drawing(block) else self.line(block)
            for block in _split(comment)
        )

    def cell(self, comment: str) -> str:
        """Return the comment on one line, with <br> between paragraphs, for a table cell."""
        return "<br>".join(self.line(block) for block in _split(comment))

    def line(self, text: str) -> str:
        """Return the lines of one paragraph as one line of Markdown."""
        joined = " ".join(text.split())
        return "".join(
            self._code(part) if part.startswith("`") else self._prose(part)
            for part in _CODE.split(joined)
        )

    def link(self, name: str) -> str:
        """Return `name` as code, as a link if it has an anchor."""
        return f"[`{name}`](#{name})" if name in self.anchors else f"`{name}`"

    def _code(self, part: str) -> str:
        return part.replace("|", "\\|")

    def _prose(self, part: str) -> str:
        return _replace_between(part, _NAME, self._name, lambda text: text.translate(_ESCAPES))

    def _name(self, name: str) -> str:
        if name in self.anchors and ("." in name or _TWO_WORDS.fullmatch(name)):
            return f"[{name}](#{name})"
        head, dot, tail = name.partition(".")
        if dot and _TWO_WORDS.fullmatch(head) and head in self.anchors:
            return f"[{head}](#{head}).{tail}"
        return name.translate(_ESCAPES)


def _replace_between(
    text: str,
    pattern: re.Pattern[str],
    match: Callable[[str], str],
    rest: Callable[[str], str],
) -> str:
    pieces: list[str] = []
    end = 0
    for found in pattern.finditer(text):
        pieces += rest(text[end : found.start()]), match(found.group())
        end = found.end()
    return "".join([*pieces, rest(text[end:])])


def _split(comment: str) -> list[str]:
    return [block for block in re.split(r"\n\s*\n", comment) if block.strip()]


def _is_drawing(block: str) -> bool:
    return all(line.startswith("  ") for line in block.splitlines())


def _dedent(block: str) -> str:
    lines = block.splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:] for line in lines)
