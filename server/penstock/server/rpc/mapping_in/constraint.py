"""Reads the constraint of a request: the format that its outputs must have.

Makes the checks that need no compiler: the syntax that the API defines, the options that conflict
with a constraint, and the limits on the cost of compiling it (size, nesting, repetitions). All
scans take linear time, because the text comes from clients. Ambiguous syntax is counted in its
costlier interpretation. The executor checks whether a constraint is valid. Only two errors are
checked here, because compilers accept them although no text matches: code points out of range, and
circular references.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, cast
from urllib.parse import unquote

from penstock.scheduler.executor import Feature
from penstock.scheduler.request import Constraint, ConstraintKind
from penstock.server.front.errors import CONSTRAINT_PATHS
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1 import options_pb2 as pb
from penstock.v1.generation_service_pb2 import GenerateRequest

_SCHEMA = CONSTRAINT_PATHS[ConstraintKind.JSON_SCHEMA]
_PATTERN = CONSTRAINT_PATHS[ConstraintKind.REGEX]
_GRAMMAR = CONSTRAINT_PATHS[ConstraintKind.GRAMMAR]
_CHOICES = CONSTRAINT_PATHS[ConstraintKind.CHOICE]

_ROOT_RULE = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)
MAX_DEPTH: Final = 64
"""Maximum nesting of brackets, objects and lists. With deeper nesting, a recursive compiler may
crash its process."""
MAX_REPETITIONS: Final = 10_000
"""Maximum copies of an element. A repetition compiles to that number of copies, and nested
repetitions to the product of their numbers."""
MAX_ELEMENTS: Final = 8192
"""Maximum elements of an expression or grammar, and objects of a schema. Reading one blocks the
event loop for up to 2 us."""
MAX_TOTAL: Final = 100_000
"""Maximum characters of a constraint with all repetitions expanded.

The limit for one element is not sufficient, because several repetitions may follow each other.
"""
_TOO_DEEP: Final = f"is nested more than {MAX_DEPTH} deep"
_TOO_LONG: Final = f"has more than {MAX_ELEMENTS} elements"
_TOO_MANY: Final = f"repeats an element more than {MAX_REPETITIONS} times"
_TOO_MUCH: Final = f"has more than {MAX_TOTAL} characters once its repetitions are written out"
# All quantifiers are possessive, so that no character is read twice.
_BRACES = r"\{\s*+(?P<low>[0-9]*+)\s*+(?:(?P<comma>,)\s*+(?P<high>[0-9]*+)\s*+)?+\}"
# An escaped bracket does not open a group, and brackets in a character class are ignored.
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
# Strings and classes end at the end of their line at the latest, so that a single quote cannot hide
# a bracket.
_GRAMMAR_TOKEN: Final = re.compile(
    r"(?P<nothing>#[^\n]*+|\s++)"
    r"|(?P<open>\()|(?P<close>\))"
    rf"|(?P<braces>{_BRACES})"
    r"|(?P<mark>[*+?|])"
    r'|(?P<text>"(?:\\.|[^"\\\n])*+"?)'
    r"|(?P<atom>\[(?:\\.|[^\]\\\n])*+\]?|[^\s()\[{*+?|\"#]++|.)",
    re.DOTALL,
)
_CODE_POINT_ESCAPE: Final = re.compile(
    r"\\(?:[uUx]\{(?P<braced>[0-9A-Fa-f]*+)\}|U(?P<long>[0-9A-Fa-f]{8})|.)", re.DOTALL
)
_TOO_FAR: Final = "names a character beyond U+10FFFF"
_REF_LOOP: Final = "has a $ref that leads to itself"
_MAX_DIGITS: Final = 9
_SIZES: Final = (
    ("minItems", "maxItems"),
    ("minContains", "maxContains"),
    ("minLength", "maxLength"),
    ("minProperties", "maxProperties"),
)
"""The keys of a JSON schema that compile to repetitions. Upper bounds compile to repetitions too:
up to a thousand items are a thousand optional copies."""


def read_constraint(
    request: GenerateRequest, limits: Limits, violations: Violations
) -> Constraint | None:
    """Return the constraint; None if there is none, or if it is invalid or not supported.

    A kind that the executor does not support is recorded as a missing feature and not checked.
    """
    if not request.HasField("constraint"):
        return None
    constraint = request.constraint
    kind = constraint.WhichOneof("kind")
    if kind is None:
        violations.add("constraint", "exactly one kind is required")
        return None
    if Feature(kind) not in limits.features:
        violations.require_feature(
            kind, f"constraint.{kind}", is_supported=False, executor=limits.executor
        )
        return None
    _check_conflicts(request, violations)
    return _READERS[kind](constraint, limits, violations)


def _check_conflicts(request: GenerateRequest, violations: Violations) -> None:
    """Record options that conflict with a constraint.

    They conflict because only the end-of-sequence token is allowed after the text that completes
    the constraint.
    """
    if request.stopping.ignore_eos:
        violations.add("stopping.ignore_eos", "must not be set together with a constraint")
    if request.stopping.min_tokens > 0:
        violations.add("stopping.min_tokens", "must be 0 together with a constraint")


def _read_schema(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    schema = message.json_schema.schema
    if not _has_valid_size(_SCHEMA, schema, limits, violations):
        return None
    reason = schema_error(schema)
    if reason:
        violations.add(_SCHEMA, reason)
        return None
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=(schema,))


def _read_regex(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    pattern = message.regex.pattern
    if not _has_valid_size(_PATTERN, pattern, limits, violations):
        return None
    reason = pattern_error(pattern)
    if reason:
        violations.add(_PATTERN, reason)
        return None
    return Constraint(kind=ConstraintKind.REGEX, texts=(pattern,))


def _read_grammar(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    grammar = message.grammar.ebnf
    if not _has_valid_size(_GRAMMAR, grammar, limits, violations):
        return None
    if not _ROOT_RULE.search(grammar):
        violations.add(_GRAMMAR, "must define the start symbol `root`")
        return None
    reason = grammar_error(grammar)
    if reason:
        violations.add(_GRAMMAR, reason)
        return None
    return Constraint(kind=ConstraintKind.GRAMMAR, texts=(grammar,))


def _read_choice(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    choices = tuple(message.choice.choices)
    if not choices:
        violations.add(_CHOICES, "must not be empty")
        return None
    if not _has_valid_num_bytes(_CHOICES, choices, limits, violations):
        return None
    is_valid = True
    known: set[str] = set()
    for index, choice in enumerate(choices):
        if not choice or choice in known:
            is_valid = False
            violations.add(f"{_CHOICES}[{index}]", "is a duplicate" if choice else "is empty")
        known.add(choice)
        is_valid = _is_free_of_nul(f"{_CHOICES}[{index}]", choice, violations) and is_valid
        if violations.is_full:
            break
    return Constraint(kind=ConstraintKind.CHOICE, texts=choices) if is_valid else None


_READERS: Mapping[str, Callable[[pb.OutputConstraint, Limits, Violations], Constraint | None]] = {
    "json_schema": _read_schema,
    "regex": _read_regex,
    "grammar": _read_grammar,
    "choice": _read_choice,
}


def _has_valid_size(path: str, text: str, limits: Limits, violations: Violations) -> bool:
    if not text:
        violations.add(path, "must not be empty")
        return False
    return _has_valid_num_bytes(path, (text,), limits, violations) and _is_free_of_nul(
        path, text, violations
    )


def _is_free_of_nul(path: str, text: str, violations: Violations) -> bool:
    """Return True if there is no NUL character; record a violation otherwise.

    A compiler that reads C strings would stop at a NUL character.
    """
    if "\0" in text:
        violations.add(path, "must not contain the character U+0000")
    return "\0" not in text


def _has_valid_num_bytes(
    path: str, texts: Sequence[str], limits: Limits, violations: Violations
) -> bool:
    num_bytes = sum(len(text.encode()) for text in texts)
    max_bytes = limits.config.max_constraint_bytes
    if num_bytes > max_bytes:
        violations.add(path, f"has {num_bytes} bytes of UTF-8, at most {max_bytes} are allowed")
    return num_bytes <= max_bytes


def pattern_error(pattern: str) -> str:
    """Return why a regular expression is rejected before it is compiled; empty if it is
    accepted."""
    return _pattern_error(pattern, _Counter())


def grammar_error(grammar: str) -> str:
    """Return why a grammar in EBNF is rejected before it is compiled; empty if it is accepted."""
    if _is_beyond_unicode(grammar):
        return _TOO_FAR
    counter = _Counter()
    for token in _GRAMMAR_TOKEN.finditer(grammar):
        if reason := counter.error_after(token):
            return reason
    return ""


def _not_json(error: ValueError) -> str:
    """Return why a text is not JSON, with the position. The text of `error` is not used, because it
    may quote the schema."""
    if not isinstance(error, json.JSONDecodeError):
        return "must be a JSON document, without NaN and Infinity"
    return f"must be a JSON document; line {error.lineno}, column {error.colno} is not JSON"


def schema_error(schema: str) -> str:
    """Return why a JSON schema is rejected before it is compiled; empty if it is accepted."""
    try:
        value: Any = json.loads(schema, parse_constant=_reject_constant)
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        return _not_json(error)
    if not isinstance(value, dict | bool):
        return "must be a JSON object, true or false"
    counter = _Counter()
    references: list[dict[str, Any]] = []
    level = _containers(cast("list[object]", [value]))
    for _ in range(MAX_DEPTH):
        for container in level:
            if not isinstance(container, dict):
                continue
            if reason := counter.count() or _keys_error(container, counter):
                return reason
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
    """Counts the elements and the repetitions of a constraint, read from left to right."""

    __slots__ = ("_brackets", "_last", "_max_copies", "_num_chars", "_num_elements")

    def __init__(self) -> None:
        self._brackets: list[tuple[int, int]] = []
        self._max_copies: int = 1
        self._num_elements: int = 0
        self._num_chars: int = 0
        self._last: tuple[int, int] = (1, 1)

    def new_text(self) -> None:
        """Start the next regular expression of a schema, with no open brackets. The counts of
        elements and characters continue."""
        while self._brackets:
            self._close()
        self._last = (1, 1)

    def error_after(self, token: re.Match[str]) -> str:
        """Count a token. Returns the error if a limit is exceeded, otherwise an empty string."""
        if reason := self.count():
            return reason
        match token.lastgroup:
            case "open":
                if len(self._brackets) == MAX_DEPTH:
                    return _TOO_DEEP
                self._brackets.append((self._max_copies, self._num_chars))
                self._max_copies, self._num_chars = 1, 0
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
        return self._error()

    def count(self) -> str:
        """Count one more element, or one more object of a schema. Returns an error or an empty
        string, as `error_after` does."""
        self._num_elements += 1
        return _TOO_LONG if self._num_elements > MAX_ELEMENTS else ""

    def repeat(self, times: int) -> str:
        """Count the repetition of the last element, which occurs `times` times in total. Returns an
        error or an empty string, as `error_after` does.
        """
        most, total = self._last
        self._last = (most * times, total * times)
        self._max_copies = max(self._max_copies, most * times)
        self._num_chars += total * (times - 1)
        return self._error()

    def add_repeated(self, times: int) -> str:
        """Count a new element that is repeated `times` times. Returns an error or an empty string,
        as `error_after` does.
        """
        self._add(1)
        return self.repeat(times)

    def _add(self, num_chars: int) -> None:
        self._num_chars += num_chars
        self._last = (1, 1)

    def _close(self) -> None:
        """Close the innermost bracket.

        If none is open, the token is counted as an ordinary character.
        """
        if not self._brackets:
            self._add(1)
            return
        # An empty group is copied too.
        inner = (self._max_copies, max(1, self._num_chars))
        most, total = self._brackets.pop()
        self._max_copies, self._num_chars, self._last = max(most, inner[0]), total + inner[1], inner

    def _error(self) -> str:
        if self._max_copies > MAX_REPETITIONS:
            return _TOO_MANY
        return _TOO_MUCH if self._num_chars > MAX_TOTAL else ""


def _pattern_error(pattern: str, counter: _Counter) -> str:
    if _is_beyond_unicode(pattern):
        return _TOO_FAR
    counter.new_text()
    for token in _PATTERN_TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind in ("back_reference", "look_around"):
            return f"has a {kind.replace('_', '-')} at character {token.start()}"
        if reason := counter.error_after(token):
            return reason
    return ""


def _times(token: re.Match[str]) -> int:
    """Return how often a quantifier such as {2,5} copies its element: the maximum of the
    quantifier, or its minimum if there is no maximum; at least 1.

    The unbounded part of a repetition compiles to a loop.
    """
    digits = (token["high"] or token["low"] or "").lstrip("0")
    times = MAX_TOTAL + 1 if len(digits) > _MAX_DIGITS else int(digits or "0")
    return max(1, times)


def _keys_error(schema: dict[str, Any], counter: _Counter) -> str:
    """Return the error in the patterns and sizes of one object of a schema; empty if there is none.

    Objects that map property names to schemas are not distinguished from schemas, and are checked
    too.
    """
    for pattern in _patterns(schema):
        if reason := _pattern_error(pattern, counter):
            return f"has an expression that {reason}"
    for pair in _SIZES:
        times = 0.0
        for key in pair:
            size = schema.get(key)
            if isinstance(size, int | float) and not isinstance(size, bool):
                if size > MAX_REPETITIONS:
                    return f"has a {key} above {MAX_REPETITIONS}"
                times = max(times, size)
        if reason := counter.add_repeated(int(times)) if times >= 1 else "":
            return reason
    return ""


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    pattern, properties = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(properties, dict):
        yield from properties


def _is_beyond_unicode(text: str) -> bool:
    """Return True if the text has an escape for a code point above U+10FFFF. A grammar compiler may
    convert such an escape to an empty character class."""
    for found in _CODE_POINT_ESCAPE.finditer(text):
        digits = (found["braced"] or found["long"] or "").lstrip("0")
        if len(digits) > _MAX_DIGITS or int(digits or "0", 16) > sys.maxunicode:
            return True
    return False


def _has_loop(root: object, references: Iterable[dict[str, Any]]) -> bool:
    """Return True if a chain of `$ref` is circular. Such a schema matches nothing."""
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
    """Return the schema to which `reference` refers; None if it refers to no schema, or is not a
    JSON pointer into the document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    at = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = cast("dict[str, object]", at).get(key)
        elif isinstance(at, list) and key.isdecimal() and len(key) <= _MAX_DIGITS:
            items = cast("list[object]", at)
            at = items[int(key)] if int(key) < len(items) else None
        else:
            return None
    return cast("dict[str, Any]", at) if isinstance(at, dict) else None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _containers(values: Iterable[object]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]
