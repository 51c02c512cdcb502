"""How much a form asks of the compiler that gets it, told without compiling it.

Owns the bounds on nesting and on repetitions, and the scans that hold expressions, grammars and
JSON schemas against them. Every scan takes time in proportion to the text: strangers send it.
Whether a form is right is for the executor to find out, but for what plainly describes no text:
characters that there are none of, and references that lead to themselves. What is odd is counted as
the costlier.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn, cast
from urllib.parse import unquote

MAX_DEPTH: Final = 64
"""Of brackets, objects and lists: a compiler that recurses may end its process at a depth that fits
the bytes."""
MAX_REPETITIONS: Final = 10_000
"""A repetition is compiled as so many copies; one inside another as their product."""
MAX_TOTAL: Final = 100_000
"""Characters of a form, once its repetitions are written out: several stand side by side."""

_TOO_DEEP: Final = f"is nested more than {MAX_DEPTH} deep"
_TOO_MANY: Final = f"repeats something more than {MAX_REPETITIONS} times"
_TOO_MUCH: Final = f"has more than {MAX_TOTAL} characters once its repetitions are written out"

# Possessive throughout: nothing is looked at twice.
_BRACES = r"\{\s*+(?P<low>[0-9]*+)\s*+(?:(?P<comma>,)\s*+(?P<high>[0-9]*+)\s*+)?+\}"
# An escaped bracket opens nothing, and a class hides what is in it.
_PATTERN_TOKEN: Final = re.compile(
    r"(?P<back_reference>\\[1-9]|\\k[<{']|\(\?P=)"
    r"|(?P<look_around>\(\?<?[=!])"
    r"|(?P<open>\()|(?P<close>\))"
    rf"|(?P<braces>{_BRACES})"
    r"|(?P<mark>[*+?|])"
    r"|(?P<atom>\\[uUx]\{[0-9A-Fa-f]*+\}|\\.|\[\^?(?:\\.|[^\]\\])*+\]?)"
    r"|(?P<plain>[^\\()\[{*+?|]++|.)",
    re.DOTALL,
)
# Texts and classes end with their line at the latest: so nobody hides a bracket behind a stray one.
_GRAMMAR_TOKEN: Final = re.compile(
    r"(?P<nothing>#[^\n]*+|\s++)"
    r"|(?P<open>\()|(?P<close>\))"
    rf"|(?P<braces>{_BRACES})"
    r"|(?P<mark>[*+?|])"
    r'|(?P<text>"(?:\\.|[^"\\\n])*+"?)'
    r"|(?P<atom>\[(?:\\.|[^\]\\\n])*+\]?|[^\s()\[{*+?|\"#]++|.)",
    re.DOTALL,
)
_FAR_CHARACTER: Final = re.compile(
    r"\\(?:[uUx]\{(?P<braced>[0-9A-Fa-f]*+)\}|U(?P<long>[0-9A-Fa-f]{8})|.)", re.DOTALL
)
_LAST_CODE_POINT: Final = 0x10FFFF
_TOO_FAR: Final = "names a character beyond U+10FFFF"
_REF_LOOP: Final = "has a $ref that leads to nothing but itself"
_MOST_DIGITS: Final = 9
_SIZES: Final = (
    ("minItems", "maxItems"),
    ("minContains", "maxContains"),
    ("minLength", "maxLength"),
    ("minProperties", "maxProperties"),
)
"""The keys of a JSON schema that compilers make repetitions of. The upper ones too: up to a
thousand items are a thousand copies that may each be left out."""


def fault_of_pattern(pattern: str) -> str:
    """What keeps an expression from being compiled, in words; empty for nothing."""
    return _fault_of_pattern(pattern, _Counter())


def fault_of_grammar(grammar: str) -> str:
    """What keeps a grammar in EBNF from being compiled, in words; empty for nothing."""
    if _is_too_far(grammar):
        return _TOO_FAR
    counter = _Counter()
    for token in _GRAMMAR_TOKEN.finditer(grammar):
        if fault := counter.fault_after(token):
            return fault
    return ""


def fault_of_schema(schema: str) -> str:
    """What keeps a text from being a JSON schema that can be compiled; empty for nothing."""
    try:
        value: Any = json.loads(schema, parse_constant=_refuse_constant)
    except RecursionError:
        return _TOO_DEEP
    except ValueError:  # its message would quote the schema
        return "must be a JSON document"
    if not isinstance(value, dict | bool):
        return "must be a JSON object, true or false"
    counter = _Counter()
    references: list[dict[str, Any]] = []
    level = _containers(cast("list[object]", [value]))
    for _ in range(MAX_DEPTH):
        for container in level:
            if not isinstance(container, dict):
                continue
            if fault := _fault_of_keys(container, counter):
                return fault
            if "$ref" in container:
                references.append(container)
        level = _containers(
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)
        )
    if level:
        return _TOO_DEEP
    return _REF_LOOP if _has_loop(cast("object", value), references) else ""


class _Counter:
    """Counts while a form is read from left to right.

    For each bracket that is open: how often the most repeated thing in it is repeated, and how
    many characters it comes to. `_last` is the same for what a repetition would apply to.
    """

    __slots__ = ("_brackets", "_last", "_most", "_total")

    def __init__(self) -> None:
        self._brackets: list[tuple[int, int]] = []
        self._most: int = 1
        self._total: int = 0
        self._last: tuple[int, int] = (1, 1)

    def new_text(self) -> None:
        """What is read next has brackets of its own; the characters go on being counted."""
        while self._brackets:
            self._close()
        self._last = (1, 1)

    def fault_after(self, token: re.Match[str]) -> str:
        """What the form is too large in by now; empty for nothing."""
        match token.lastgroup:
            case "open":
                if len(self._brackets) == MAX_DEPTH:
                    return _TOO_DEEP
                self._brackets.append((self._most, self._total))
                self._most, self._total = 1, 0
            case "close":
                self._close()
            case "braces":
                return self.repeat(_times(token))
            case "atom":
                self._add(1)
            case "plain":
                self._add(len(token[0]))
            case "text":
                self._add(len(token[0]))
                self._last = (1, len(token[0]))
            case _:
                pass
        return self._fault()

    def repeat(self, times: int) -> str:
        """What came last is there so many times; what is too large then, empty for nothing."""
        most, total = self._last
        self._last = (most * times, total * times)
        self._most = max(self._most, most * times)
        self._total += total * (times - 1)
        return self._fault()

    def add_repeated(self, times: int) -> str:
        """Something stands here so many times; what is too large then, empty for nothing."""
        self._add(1)
        return self.repeat(times)

    def _add(self, num_chars: int) -> None:
        self._total += num_chars
        self._last = (1, 1)

    def _close(self) -> None:
        """Without a bracket that is open it is a character like others."""
        if not self._brackets:
            self._add(1)
            return
        # An empty one is copied like any other.
        inner = (self._most, max(1, self._total))
        most, total = self._brackets.pop()
        self._most, self._total, self._last = max(most, inner[0]), total + inner[1], inner

    def _fault(self) -> str:
        if self._most > MAX_REPETITIONS:
            return _TOO_MANY
        return _TOO_MUCH if self._total > MAX_TOTAL else ""


def _fault_of_pattern(pattern: str, counter: _Counter) -> str:
    if _is_too_far(pattern):
        return _TOO_FAR
    counter.new_text()
    for token in _PATTERN_TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind in ("back_reference", "look_around"):
            return f"has a {kind.replace('_', '-')} at character {token.start()}"
        if fault := counter.fault_after(token):
            return fault
    return ""


def _times(token: re.Match[str]) -> int:
    """The upper end of a repetition; without one, the lower: the rest is a loop, not copies."""
    digits = (token["high"] or token["low"] or "").lstrip("0")
    times = MAX_TOTAL + 1 if len(digits) > _MOST_DIGITS else int(digits or "0")
    return max(1, times)


def _fault_of_keys(schema: dict[str, Any], counter: _Counter) -> str:
    """Of one object, wherever it is: a property may have the name of a keyword, and the reverse."""
    for pattern in _patterns(schema):
        if fault := _fault_of_pattern(pattern, counter):
            return f"has an expression that {fault}"
    for pair in _SIZES:
        times = 0.0
        for key in pair:
            size = schema.get(key)
            if isinstance(size, int | float) and not isinstance(size, bool):
                if size > MAX_REPETITIONS:
                    return f"has a {key} above {MAX_REPETITIONS}"
                times = max(times, size)
        if fault := counter.add_repeated(int(times)) if times >= 1 else "":
            return fault
    return ""


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    pattern, properties = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(properties, dict):
        yield from properties


def _is_too_far(text: str) -> bool:
    """No text holds such a character: a compiler may make a class of it that nothing is in."""
    for found in _FAR_CHARACTER.finditer(text):
        digits = (found["braced"] or found["long"] or "").lstrip("0")
        if len(digits) > _MOST_DIGITS or int(digits or "0", 16) > _LAST_CODE_POINT:
            return True
    return False


def _has_loop(root: object, references: Iterable[dict[str, Any]]) -> bool:
    """Whether following `$ref` from one to the next comes back: such a schema describes nothing."""
    known: set[int] = set()
    for start in references:
        walked: set[int] = set()
        at: dict[str, Any] | None = start
        while at is not None and id(at) not in known:
            known.add(id(at))
            walked.add(id(at))
            at = _target(root, at.get("$ref"))
        if id(at) in walked:
            return True
    return False


def _target(root: object, reference: object) -> dict[str, Any] | None:
    """The schema that a JSON pointer within the document leads to; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    at = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = cast("dict[str, object]", at).get(key)
        elif isinstance(at, list) and key.isdecimal() and len(key) <= _MOST_DIGITS:
            items = cast("list[object]", at)
            at = items[int(key)] if int(key) < len(items) else None
        else:
            return None
    return cast("dict[str, Any]", at) if isinstance(at, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _containers(values: Iterable[object]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]
