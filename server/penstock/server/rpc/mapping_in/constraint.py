"""Constraint: the form an output must have.

Owns the checks that need no compiler: size, syntax as far as the contract draws it. Whether a form
can be compiled is for the executor to find out.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from penstock.scheduler.executor import Feature
from penstock.scheduler.request_options import Constraint, ConstraintKind
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1 import options_pb2 as pb
from penstock.v1.generation_service_pb2 import GenerateRequest

MAX_SCHEMA_DEPTH = 64
"""A compiler that recurses on the schema may end its process at a depth that fits the bytes."""

_SCHEMA = "constraint.json_schema.schema"
_PATTERN = "constraint.regex.pattern"
_GRAMMAR = "constraint.grammar.ebnf"
_CHOICES = "constraint.choice.choices"

# Both take time in proportion to the text, whatever it is: strangers send it.
_ROOT_RULE = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)
# Tokens of a pattern, so that an escaped bracket opens nothing and a class hides what is in it.
_PATTERN_TOKEN = re.compile(
    r"(?P<back_reference>\\[1-9]|\\k[<{']|\(\?P=)"
    r"|(?P<look_around>\(\?<?[=!])"
    r"|\\."
    r"|\[\^?(?:\\.|[^\]\\])*+\]?",
    re.DOTALL,
)


def read_constraint(
    request: GenerateRequest, limits: Limits, violations: Violations
) -> Constraint | None:
    """The form asked for, None when there is none; a kind that is not offered is not looked at."""
    if not request.HasField("constraint"):
        return None
    constraint = request.constraint
    kind = constraint.WhichOneof("kind")
    if kind is None:
        violations.add("constraint", "exactly one kind is required")
        return None
    if Feature(kind) not in limits.features:
        violations.require_feature(kind, f"constraint.{kind}", is_supported=False)
        return None
    return _READERS[kind](constraint, limits, violations)


def _read_schema(
    message: pb.Constraint, limits: Limits, violations: Violations
) -> Constraint | None:
    schema = message.json_schema.schema
    if not _is_size_right(_SCHEMA, schema, limits, violations):
        return None
    fault = _fault_of_schema(schema)
    if fault:
        violations.add(_SCHEMA, fault)
        return None
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=(schema,))


def _read_regex(
    message: pb.Constraint, limits: Limits, violations: Violations
) -> Constraint | None:
    pattern = message.regex.pattern
    if not _is_size_right(_PATTERN, pattern, limits, violations):
        return None
    for token in _PATTERN_TOKEN.finditer(pattern):
        if token.lastgroup is not None:
            words = token.lastgroup.replace("_", "-")
            violations.add(_PATTERN, f"has a {words} at character {token.start()}")
            return None
    return Constraint(kind=ConstraintKind.REGEX, texts=(pattern,))


def _read_grammar(
    message: pb.Constraint, limits: Limits, violations: Violations
) -> Constraint | None:
    grammar = message.grammar.ebnf
    if not _is_size_right(_GRAMMAR, grammar, limits, violations):
        return None
    if not _ROOT_RULE.search(grammar):
        violations.add(_GRAMMAR, "must define the start symbol `root`")
        return None
    return Constraint(kind=ConstraintKind.GRAMMAR, texts=(grammar,))


def _read_choice(
    message: pb.Constraint, limits: Limits, violations: Violations
) -> Constraint | None:
    choices = tuple(message.choice.choices)
    if not choices:
        violations.add(_CHOICES, "must not be empty")
        return None
    if not _is_bytes_right(_CHOICES, choices, limits, violations):
        return None
    is_right = True
    known: set[str] = set()
    for index, choice in enumerate(choices):
        if not choice or choice in known:
            is_right = False
            violations.add(f"{_CHOICES}[{index}]", "is there twice" if choice else "is empty")
        known.add(choice)
    return Constraint(kind=ConstraintKind.CHOICE, texts=choices) if is_right else None


_READERS: Mapping[str, Callable[[pb.Constraint, Limits, Violations], Constraint | None]] = {
    "json_schema": _read_schema,
    "regex": _read_regex,
    "grammar": _read_grammar,
    "choice": _read_choice,
}


def _is_size_right(path: str, text: str, limits: Limits, violations: Violations) -> bool:
    if not text:
        violations.add(path, "must not be empty")
        return False
    return _is_bytes_right(path, (text,), limits, violations)


def _is_bytes_right(
    path: str, texts: Sequence[str], limits: Limits, violations: Violations
) -> bool:
    num_bytes = sum(len(text.encode()) for text in texts)
    max_bytes = limits.config.max_constraint_bytes
    if num_bytes > max_bytes:
        violations.add(path, f"has {num_bytes} bytes of UTF-8, at most {max_bytes} are allowed")
    return num_bytes <= max_bytes


def _fault_of_schema(schema: str) -> str:
    """What keeps a text from being a JSON schema, in words; empty for nothing."""
    too_deep = f"is nested more than {MAX_SCHEMA_DEPTH} deep"
    try:
        value: Any = json.loads(schema, parse_constant=_refuse_constant)
    except RecursionError:
        return too_deep
    except ValueError:  # its message would quote the schema
        return "must be a JSON document"
    if not isinstance(value, dict | bool):
        return "must be a JSON object, true or false"
    return too_deep if _is_deeper(value, MAX_SCHEMA_DEPTH) else ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Whether objects and lists are nested deeper than `max_depth`; without recursion."""
    level = _containers((value,))
    for _ in range(max_depth):
        level = _containers(
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)
        )
    return bool(level)


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if _is_container(value)]


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list)
