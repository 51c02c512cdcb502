"""Finds the commands in the shell blocks of a page, and splits them like a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_source import blocks

SHELLS = {"sh", "bash", "console", "shell"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
# Not "penstock metrics on http://...", which is a service's output.
_OURS = re.compile(r"(?:penstock [a-z]+|grpcurl)(?! on )(?: |$)")
_ENDS = {"|", "||", "&&", "&", ";", "(", ")", ">", ">>", "<", "<<", ">&", "|&", ";;"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: its words, the program first, and its line number in the page."""

    words: tuple[str, ...]
    line: int


def commands(markdown: str) -> Iterator[Command]:
    """Yield the commands in `sh`, `bash` and `shell` blocks. In `console` blocks and blocks without
    a language, a line is a command only if it begins with `$`, `grpcurl` or a `penstock` command.
    """
    for block in blocks(markdown):
        if block.language not in SHELLS | {""}:
            continue
        for line, text in _logical_lines(block.text, block.line):
            prompted = text.startswith("$ ")
            if block.language in {"", "console"} and not prompted and not _OURS.match(text):
                continue
            for words in _split(text.removeprefix("$ ")):
                yield Command(words=words, line=line)


def _logical_lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    start, joined = first, ""
    for number, line in enumerate(text.splitlines(), first):
        start = start if joined else number
        joined += line.strip() if joined else line
        if joined.endswith("\\"):
            joined = joined.removesuffix("\\")
        elif joined.count("'") % 2 == 0:
            yield start, joined.strip()
            joined = ""
    if joined:
        yield start, joined.strip()


def _split(text: str) -> Iterator[tuple[str, ...]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.commenters = ""
    lexer.whitespace_split = True
    words: list[str] = []
    skip_target = False
    for word in lexer:
        if word.startswith("#"):
            break
        if word in _ENDS:
            if word.startswith((">", "<")):
                skip_target = True
                continue
            if words:
                yield tuple(words)
            words, skip_target = [], False
        elif skip_target:
            skip_target = False
        elif words or not _ASSIGNMENT.fullmatch(word):
            words.append(word)
    if words:
        yield tuple(words)
