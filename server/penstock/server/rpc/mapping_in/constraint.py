"""Constraint: the format an output must have.

Owns the checks that need no compiler: size, the syntax that the contract defines, and which options
exclude a constraint. Whether it compiles is checked by the executor.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from penstock.scheduler.executor import Feature
from penstock.scheduler.request import Constraint, ConstraintKind
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.form_size import (
    fault_of_grammar,
    fault_of_pattern,
    fault_of_schema,
)
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1 import options_pb2 as pb
from penstock.v1.generation_service_pb2 import GenerateRequest

_SCHEMA = "constraint.json_schema.schema"
_PATTERN = "constraint.regex.pattern"
_GRAMMAR = "constraint.grammar.ebnf"
_CHOICES = "constraint.choice.choices"

_ROOT_RULE = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)


def read_constraint(
    request: GenerateRequest, limits: Limits, violations: Violations
) -> Constraint | None:
    """The constraint, None when there is none; a kind that is not supported is not checked."""
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
    _check_company(request, violations)
    return _READERS[kind](constraint, limits, violations)


def _check_company(request: GenerateRequest, violations: Violations) -> None:
    """A constraint that is complete allows only the end-of-sequence token."""
    if request.stopping.ignore_eos:
        violations.add("stopping.ignore_eos", "must not be set together with a constraint")
    if request.stopping.min_tokens > 0:
        violations.add("stopping.min_tokens", "must be 0 together with a constraint")


def _read_schema(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    schema = message.json_schema.schema
    if not _is_size_right(_SCHEMA, schema, limits, violations):
        return None
    fault = fault_of_schema(schema)
    if fault:
        violations.add(_SCHEMA, fault)
        return None
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, texts=(schema,))


def _read_regex(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    pattern = message.regex.pattern
    if not _is_size_right(_PATTERN, pattern, limits, violations):
        return None
    fault = fault_of_pattern(pattern)
    if fault:
        violations.add(_PATTERN, fault)
        return None
    return Constraint(kind=ConstraintKind.REGEX, texts=(pattern,))


def _read_grammar(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
) -> Constraint | None:
    grammar = message.grammar.ebnf
    if not _is_size_right(_GRAMMAR, grammar, limits, violations):
        return None
    if not _ROOT_RULE.search(grammar):
        violations.add(_GRAMMAR, "must define the start symbol `root`")
        return None
    fault = fault_of_grammar(grammar)
    if fault:
        violations.add(_GRAMMAR, fault)
        return None
    return Constraint(kind=ConstraintKind.GRAMMAR, texts=(grammar,))


def _read_choice(
    message: pb.OutputConstraint, limits: Limits, violations: Violations
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
            violations.add(f"{_CHOICES}[{index}]", "is a duplicate" if choice else "is empty")
        known.add(choice)
        is_right = _is_free_of_nul(f"{_CHOICES}[{index}]", choice, violations) and is_right
    return Constraint(kind=ConstraintKind.CHOICE, texts=choices) if is_right else None


_READERS: Mapping[str, Callable[[pb.OutputConstraint, Limits, Violations], Constraint | None]] = {
    "json_schema": _read_schema,
    "regex": _read_regex,
    "grammar": _read_grammar,
    "choice": _read_choice,
}


def _is_size_right(path: str, text: str, limits: Limits, violations: Violations) -> bool:
    if not text:
        violations.add(path, "must not be empty")
        return False
    return _is_bytes_right(path, (text,), limits, violations) and _is_free_of_nul(
        path, text, violations
    )


def _is_free_of_nul(path: str, text: str, violations: Violations) -> bool:
    """Compilers that read a C string would enforce only the part before it."""
    if "\0" in text:
        violations.add(path, "must not contain the character U+0000")
    return "\0" not in text


def _is_bytes_right(
    path: str, texts: Sequence[str], limits: Limits, violations: Violations
) -> bool:
    num_bytes = sum(len(text.encode()) for text in texts)
    max_bytes = limits.config.max_constraint_bytes
    if num_bytes > max_bytes:
        violations.add(path, f"has {num_bytes} bytes of UTF-8, at most {max_bytes} are allowed")
    return num_bytes <= max_bytes
