"""Checks of structured output: the outputs are validated against their constraints with Python's
`json` and `re`.
"""

import json
import re
from typing import Any, cast

from penstock.client import (
    ChoiceConstraint,
    Constraint,
    FinishReason,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckFailed,
    require,
)
from penstock.tools.verify.subject import Subject

# Every value is from a short list, so that the output is bounded, as in the grammar below.
_SIZES = ("small", "medium", "large")
_GRADES = (1, 2, 3)
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "string", "enum": list(_SIZES)},
        "grade": {"type": "integer", "enum": list(_GRADES)},
        "is_wet": {"type": "boolean"},
    },
    "required": ["size", "grade", "is_wet"],
    "additionalProperties": False,
}
_PATTERN = r"[A-C]{3}-[0-9]{4}"
# Matching brackets of bounded depth, so that output ends even with random weights.
_GRAMMAR = 'root ::= "(" inner? ")"\ninner ::= "[" leaf? "]"\nleaf ::= "x" | "y"\n'
_GRAMMAR_AS_PATTERN = r"\((\[[xy]?\])?\)"
_CHOICES = ("sluice", "turbine", "penstock")
_MAX_TOKENS = 96
_PROMPT = "Answer in the required form: "


async def _constrained(subject: Subject, constraint: Constraint) -> str:
    transcript = await subject.generate(
        subject.prompt(_PROMPT),
        constraint=constraint,
        temperature=0.0,
        max_tokens=subject.clamp_output_tokens(_MAX_TOKENS),
        return_token_ids=True,
    )
    text, reason = transcript.text(), transcript.end.finish_reason
    require(reason is FinishReason.STOP, f"ended by {reason.name} with {text!r}")
    return text


async def _json_schema(subject: Subject) -> str:
    text = await _constrained(subject, JsonSchemaConstraint(schema=json.dumps(_SCHEMA)))
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckFailed(f"no JSON: {text!r} ({error})") from error
    require(_fits_schema(found), f"does not fit the schema: {text!r}")
    return f"valid: {text.strip()!r}"


def _fits_schema(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    fields = cast("dict[str, Any]", found)
    return (
        fields.keys() == {"size", "grade", "is_wet"}
        and fields["size"] in _SIZES
        and fields["grade"] in _GRADES
        and isinstance(fields["is_wet"], bool)
    )


async def _regex(subject: Subject) -> str:
    text = await _constrained(subject, RegexConstraint(pattern=_PATTERN))
    require(re.fullmatch(_PATTERN, text) is not None, f"{text!r} does not match {_PATTERN}")
    return f"{text!r} matches"


async def _grammar(subject: Subject) -> str:
    text = await _constrained(subject, GrammarConstraint(ebnf=_GRAMMAR))
    require(re.fullmatch(_GRAMMAR_AS_PATTERN, text) is not None, f"{text!r} violates the grammar")
    return f"{text!r} fits the grammar"


async def _choice(subject: Subject) -> str:
    text = await _constrained(subject, ChoiceConstraint(choices=_CHOICES))
    require(text in _CHOICES, f"{text!r} is none of {', '.join(_CHOICES)}")
    return f"{text!r} is one of {len(_CHOICES)}"


CHECKS = (
    Check(name="json-schema", run=_json_schema, feature="json_schema"),
    Check(name="regex", run=_regex, feature="regex"),
    Check(name="grammar", run=_grammar, feature="grammar"),
    Check(name="choice", run=_choice, feature="choice"),
)
