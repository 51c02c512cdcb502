"""Finds dead ends of a grammar: rules that derive no finite text, so that an output in such a rule
can never be completed.

Parses the text form of xgrammar's grammars, and computes a fixpoint over their rules. When a guided
decoder reaches such a rule, no token is allowed and every logit is minus infinity. In versions
before NVIDIA PR #18896, the whole engine then fails. Does not import xgrammar.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(
    r"(?P<nothing>\s++|#[^\n]*+)"
    r"|(?P<rule>[A-Za-z_][\w.-]*+)\s*+::="
    r"|(?P<look_ahead>\(=)|(?P<open>\()|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<optional>[*?]|\{\s*+0\b[^}]*+\})|(?P<repeated>\+|\{[^}]*+\})"
    r'|(?P<text>"(?:\\.|[^"\\])*+")'
    r"|(?P<class>\[(?:\\.|[^\]\\])*+\])"
    r"|(?P<name>[A-Za-z_][\w.-]*+)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_CHARACTER: Final = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<escaped>.)|(?P<plain>.)",
    re.DOTALL,
)
_ESCAPED: Final = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "b": 8, "a": 7, "e": 27, "0": 0}
_ROOT: Final = "root"
_NEVER: Final = ""
"""Stands for text that cannot be generated, such as an empty character class. No rule has this
name, so it is never productive.
"""


def has_dead_end(grammar: str) -> bool:
    """Return whether a rule that is reachable from `root` derives no finite text."""
    rules = _read(grammar)
    productive = _productive(rules)
    return any(name not in productive for name in _reachable(rules))


@dataclass(slots=True)
class _Rule:
    """A rule, or a parenthesised group. `alternatives`: for each alternative, the rules that it
    needs.

    `optional`: rules that an alternative mentions but does not need, such as the operand of `*`.
    """

    alternatives: list[list[str]] = field(default_factory=lambda: [[]])
    optional: list[str] = field(default_factory=list[str])


def _read(grammar: str) -> dict[str, _Rule]:
    """Return the rules of a grammar, by name; parenthesised groups are included as rules with names
    that no grammar can use.
    """
    reader = _GrammarReader()
    for token in _TOKEN.finditer(grammar):
        if token.lastgroup != "nothing":
            reader.take(token)
    return reader.rules


class _GrammarReader:
    """Builds `rules` from the tokens of a grammar, from left to right."""

    def __init__(self) -> None:
        self.rules: dict[str, _Rule] = {}
        # Innermost bracket last. Text before the first rule belongs to no rule.
        self._open = [_Rule()]
        # The operand of a quantifier; None if it needs no rule.
        self._last: str | None = None

    def take(self, token: re.Match[str]) -> None:
        last, self._last = self._last, None
        current = self._open[-1]
        match token.lastgroup:
            case "rule":
                self._open = [self.rules.setdefault(token["rule"], _Rule())]
            case "open" | "look_ahead":
                self._enter(current, is_needed=token.lastgroup == "open")
            case "close" if len(self._open) > 1:
                self._open.pop()
                needed = self._open[-1].alternatives[-1]
                self._last = needed[-1] if needed else None
            case "bar":
                current.alternatives.append([])
            case "optional" if last is not None:
                current.optional.append(current.alternatives[-1].pop())
            case "name" | "text" | "class":
                self._last = _needed_by(token)
                if self._last is not None:
                    current.alternatives[-1].append(self._last)
            case _:
                pass

    def _enter(self, current: _Rule, *, is_needed: bool) -> None:
        name = f"({len(self.rules)}"
        self.rules[name] = _Rule()
        if is_needed:
            current.alternatives[-1].append(name)
        self._open.append(self.rules[name])


def _needed_by(token: re.Match[str]) -> str | None:
    """Return the rule that a token of an alternative needs: the rule it names; None for text or a
    character class that can be generated, `_NEVER` for one that cannot.
    """
    if token.lastgroup == "name":
        return token[0]
    inner = token[0][1:-1]
    if token.lastgroup == "class":
        can_be_written = _has_member(inner)
    else:
        can_be_written = all(point <= sys.maxunicode for point in _points(inner))
    return None if can_be_written else _NEVER


def _has_member(members: str) -> bool:
    """Return whether a character class, given without its brackets, matches any character. One with
    an invalid code point matches none.
    """
    is_negated = members.startswith("^")
    ranges = sorted(_ranges(members[is_negated:]))
    if any(high > sys.maxunicode for _, high in ranges):
        return False
    if not is_negated:
        return bool(ranges)
    covered_to = -1
    for low, high in ranges:
        if low > covered_to + 1:
            return True
        covered_to = max(covered_to, high)
    return covered_to < sys.maxunicode


def _ranges(members: str) -> Iterator[tuple[int, int]]:
    found = list(_CHARACTER.finditer(members))
    index = 0
    while index < len(found):
        low = high = _point(found[index])
        if index + 2 < len(found) and found[index + 1][0] == "-":
            high = _point(found[index + 2])
            index += 2
        yield low, high
        index += 1


def _points(text: str) -> Iterator[int]:
    return map(_point, _CHARACTER.finditer(text))


def _point(character: re.Match[str]) -> int:
    kind, value = character.lastgroup, character[character.lastgroup or 0]
    if kind == "plain":
        return ord(value)
    if kind == "escaped":
        return _ESCAPED.get(value, ord(value))
    return int(value, 16)


def _productive(rules: dict[str, _Rule]) -> set[str]:
    """Return the productive rules (those that derive a finite text), computed bottom-up."""
    # By needed rule: the alternatives that wait for it, each with its rule and missing rules.
    waiting: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    ready: list[str] = []
    for name, rule in rules.items():
        for alternative in rule.alternatives:
            # xgrammar rejects a name without a rule.
            needs = {each for each in alternative if each in rules or each == _NEVER}
            if not needs:
                ready.append(name)
            for need in needs:
                waiting[need].append((name, needs))
    productive: set[str] = set()
    while ready:
        name = ready.pop()
        if name in productive:
            continue
        productive.add(name)
        for user, needs in waiting.pop(name, ()):
            needs.discard(name)
            if not needs:
                ready.append(user)
    return productive


def _reachable(rules: dict[str, _Rule]) -> set[str]:
    reached: set[str] = set()
    todo = [_ROOT]
    while todo:
        name = todo.pop()
        if name in reached or name not in rules:
            continue
        reached.add(name)
        rule = rules[name]
        todo += rule.optional
        for alternative in rule.alternatives:
            todo += alternative
    return reached
