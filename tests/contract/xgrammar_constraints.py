"""Constraints for xgrammar: some do not compile, some have a dead end, and some are valid.

Run as a program, this module checks them with the xgrammar on its path, and prints a JSON object
with the fault of each constraint and the error texts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from penstock.executor.trtllm.constraint_check import (
    _BUILDERS,
    NO_OUTPUT,
    NOT_COMPILED,
    fault_of,
    installed_grammar,
)
from penstock.scheduler.request import Constraint, ConstraintKind

S, R, G, C = (
    ConstraintKind.JSON_SCHEMA,
    ConstraintKind.REGEX,
    ConstraintKind.GRAMMAR,
    ConstraintKind.CHOICE,
)
BROKEN = [
    (S, '{"type": "strnig"}'),
    (S, '{"type": 7}'),
    (S, '{"properties": 7}'),
    (S, '{"type": "object", "properties": {"a": {"type": "flaot"}}}'),
    (S, '{"required": "a", "type": "object"}'),
    (S, '{"enum": []}'),
    (S, '{"type": "array", "minItems": 3, "maxItems": 1}'),
    (S, '{"type": "array", "items": false, "minItems": 1}'),
    (S, '{"type": "string", "minLength": 5, "maxLength": 2}'),
    (S, '{"type": "integer", "minimum": 5, "maximum": 2}'),
    (S, '{"type": "object", "minProperties": 3, "maxProperties": 1}'),
    (S, '{"type": "object", "additionalProperties": false, "minProperties": 1}'),
    (S, '{"type": "string", "pattern": "["}'),
    (S, '{"type": "string", "pattern": "[]"}'),
    (S, '{"$ref": "#/$defs/missing"}'),
    (S, "false"),
    (S, '{"type": "object", "properties": {"a": false}}'),
    (S, '{"const": "\\ud800"}'),
    (R, "(unclosed"),
    (R, "[unclosed"),
    (R, "[]"),
    (R, "a)"),
    (R, r"\bword\b"),
    (R, "a{3"),
    (G, "root ::= undefined"),
    (G, "root ::= ("),
    (G, "root ::= [z-a]"),
    (G, 'root ::= "unclosed'),
]
DEAD_ENDS = [
    (S, '{"$ref": "#"}'),
    (S, '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    (S, '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    (S, '{"anyOf": [{"$ref": "#"}]}'),
    (S, '{"allOf": [{"$ref": "#"}]}'),
    (S, '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    (S, '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
    (S, '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}'),
    (S, '{"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}'),
    (R, r"[^\s\S]"),
    (R, r"[\u{110000}-\u{110001}]"),
    (G, "root ::= root"),
    (G, "root ::= a\na ::= b\nb ::= a"),
    (G, 'root ::= "x" a\na ::= a "y"'),
    (G, 'root ::= "x" | "y" a\na ::= a'),
    (G, 'root ::= a{0,2} "z"\na ::= a "x"'),
    (G, 'root ::= "x" []'),
    (G, r"root ::= [\U0010FFFF-\U00110000]"),
    (G, r"root ::= [^\x00-\U0010FFFF]"),
]
GOOD = [
    (S, "{}"),
    (S, "true"),
    (S, '{"anyOf": [{"$ref": "#"}, {"type": "string"}]}'),
    (S, '{"type": "object", "properties": {"next": {"$ref": "#"}}}'),
    (S, '{"type": "array", "items": {"$ref": "#"}}'),
    (S, '{"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string",'
        ' "pattern": "^a{2,3}$"}}, "required": ["n"], "additionalProperties": false}'),
    (S, '{"type": "string", "format": "email"}'),
    (S, '{"enum": ["(", "|", ")", "[", "root", "::="]}'),
    (S, '{"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 40}'),
    (R, "(a|b)*c"),
    (R, r"\d{3}-[()|\]]+"),
    (R, "[^a-z]?"),
    (C, ("(a|b)", 'say "::="', "root")),
    (G, 'root ::= root "a" | "a"'),
    (G, 'root ::= "(" root ")" | "x"'),
    (G, 'root ::= "("* ")" | [()|]+'),
    (G, 'root ::= ""'),
    (G, 'root ::= (a | "b")* c?\na ::= [^"\\\\]{1,3}\nc ::= "::=" | "#" | "" | [|]'),
]  # fmt: skip


def constraint(kind: ConstraintKind, form: str | tuple[str, ...]) -> Constraint:
    return Constraint(kind=kind, texts=(form,) if isinstance(form, str) else form)


def expected() -> dict[str, str]:
    """Return the expected fault by the text form of each constraint; "" for a valid constraint."""
    faults = {**dict.fromkeys(map(str, BROKEN), NOT_COMPILED)}
    faults |= dict.fromkeys(map(str, DEAD_ENDS), NO_OUTPUT)
    return faults | dict.fromkeys(map(str, GOOD), "")


def texts_of_rejections(grammar: Any) -> list[tuple[str, str]]:
    """Return (the engine's error text, the constraint that it may quote) of each invalid
    constraint.
    """
    texts: list[tuple[str, str]] = []
    for kind, form in BROKEN:
        try:
            getattr(grammar, _BUILDERS[kind])(form)
        except Exception as error:
            texts.append((f"Guided decoding error: {error}", str(form)))
    return texts


def main() -> None:
    grammar = installed_grammar()
    every: list[tuple[ConstraintKind, Any]] = [*BROKEN, *DEAD_ENDS, *GOOD]
    found = {str(each): fault_of(grammar, constraint(*each)) for each in every}
    json.dump({"faults": found, "texts": texts_of_rejections(grammar)}, sys.stdout)


if __name__ == "__main__":
    main()
