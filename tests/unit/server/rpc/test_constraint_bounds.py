"""Rejections name the field of a constraint that exceeds its limits, or the field of an option that
cannot be combined with a constraint.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import RequestError
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.generation import read_generation
from support.fronts import INFO
from support.generate_requests import text_request
from support.request_edits import Edit, choices, grammar, put, regex, schema

LIMITS = Limits.from_config(FrontConfig(), INFO)
SCHEMA, PATTERN = "constraint.json_schema.schema", "constraint.regex.pattern"
EBNF = "constraint.grammar.ebnf"


def violations(*edits: Edit) -> dict[str, str]:
    message = text_request()
    for edit in edits:
        edit(message)
    try:
        read_generation(message, LIMITS, ("tiny",))
    except RequestError as error:
        return {item.path: item.description for item in error.failure.violations}
    return {}


def ebnf(body: str) -> Edit:
    return grammar(f"root ::= {body}")


def document(value: Any) -> Edit:
    return schema(json.dumps(value))


TOO_LARGE: list[tuple[Edit, str, str]] = [
    *[
        (regex(pattern), PATTERN, words)
        for pattern, words in (
            ("(" * 60_000, "nested more than 64 deep"),
            ("(" * 65 + ")" * 65, "nested more than 64 deep"),
            ("((a{1000}){1000}){1000}", "repeats an element more than 10000 times"),
            ("(x(a{100})+y){101}", "repeats an element more than 10000 times"),
            ("(a{5}|b{2000}){6}", "repeats an element more than 10000 times"),
            ("a{100}{101}", "repeats an element more than 10000 times"),
            ("a{10001}", "repeats an element more than 10000 times"),
            ("a{10001,}", "repeats an element more than 10000 times"),
            ("a{0,10001}", "repeats an element more than 10000 times"),
            ("a{,10001}", "repeats an element more than 10000 times"),
            ("[a]{ 1 , 10001 }", "repeats an element more than 10000 times"),
            (r"\d{" + "9" * 5000 + "}", "repeats an element more than 10000 times"),
            ("a{10000}" * 11, "more than 100000 characters"),
            ("(abcdefghijk){10000}", "more than 100000 characters"),
            ("(a|b)" * 1639, "more than 8192 elements"),
        )
    ],
    *[
        (ebnf(body), EBNF, words)
        for body, words in (
            ("(" * 65 + '"a"' + ")" * 65, "nested more than 64 deep"),
            ('"' + "(" * 65 + "\n" + "(" * 65, "nested more than 64 deep"),
            ("b{1000000}\nb ::= [a]", "repeats an element more than 10000 times"),
            ('("a" {1000}) {1000}', "repeats an element more than 10000 times"),
            (r'"\"" b{10001}', "repeats an element more than 10000 times"),
            ("item{10000} " * 11, "more than 100000 characters"),
            ('"a" | ' * 3000 + '"b"', "more than 8192 elements"),
        )
    ],
    *[
        (document(value), SCHEMA, words)
        for value, words in (
            ({"minItems": 1_000_000_000}, "a minItems above 10000"),
            ({"x": [{}] * 8192}, "more than 8192 elements"),
            ({"properties": {"a": {"maxItems": 10_001}}}, "a maxItems above 10000"),
            ({"minLength": 1e9}, "a minLength above 10000"),
            ({"maxLength": 10_001}, "a maxLength above 10000"),
            ({"anyOf": [True, {"minProperties": 10_001}]}, "a minProperties above 10000"),
            ({"maxProperties": 10_001}, "a maxProperties above 10000"),
            ({"minContains": 10_001}, "a minContains above 10000"),
            ({"allOf": [{"maxLength": 10_000}] * 11}, "more than 100000 characters"),
            ({"pattern": "(" * 65}, "an expression that is nested more than 64 deep"),
            ({"items": {"pattern": "a(?=b)"}}, "an expression that has a look-around"),
            ({"patternProperties": {"(a{200}){200}": {}}}, "an expression that repeats"),
            ({"allOf": [{"pattern": "a{9999}"}] * 11}, "more than 100000 characters"),
        )
    ],
]


FAR = "a character beyond U+10FFFF"
LOOP = "a $ref that leads to itself"
NOTHING: list[tuple[Edit, str, str]] = [
    (regex(r"[\u{10FFFF}-\u{110000}]"), PATTERN, FAR),
    (regex(r"a\U00110000"), PATTERN, FAR),
    (regex(r"\x{" + "f" * 9000 + "}"), PATTERN, FAR),
    (ebnf(r"[\U0010FFFF-\U00110000]"), EBNF, FAR),
    (ebnf(r'"\UFFFFFFFF"'), EBNF, FAR),
    (document({"type": "string", "pattern": r"\u{110000}"}), SCHEMA, FAR),
    (document({"$ref": "#"}), SCHEMA, LOOP),
    (document({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), SCHEMA, LOOP),
    (
        document({"$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": {"$ref": "#/$defs/a"}}}),
        SCHEMA,
        LOOP,
    ),
    (document({"prefixItems": [{"$ref": "#/prefixItems/0"}]}), SCHEMA, LOOP),
]
"""Constraints that cannot match any text."""


@pytest.mark.parametrize(("edit", "path", "words"), NOTHING)
def test_a_constraint_without_matching_text_is_rejected(edit: Edit, path: str, words: str) -> None:
    assert words in violations(edit)[path]


@pytest.mark.parametrize(
    "edit",
    [
        regex(r"[\u{10FFFF}]\\U00110000"),
        ebnf(r"[\x00-\U0010FFFF] \\U00110000"),
        document({"type": "object", "properties": {"next": {"$ref": "#"}}}),
        document({"properties": {"$ref": {"type": "string"}}, "anyOf": [{"$ref": "#/none/3"}]}),
        document({"$ref": "https://example.com/#"}),
        document({"items": [{"$ref": "#/items/9"}, {"$ref": "#/items/" + "9" * 5000}]}),
        document({f"p{i}": {"$ref": f"#/p{i + 1}"} for i in range(2000)}),
    ],
)
def test_valid_references_and_characters_are_accepted(edit: Edit) -> None:
    assert not violations(edit)


@pytest.mark.parametrize(("edit", "path", "words"), TOO_LARGE)
def test_constraints_too_large_for_a_compiler_are_rejected(
    edit: Edit, path: str, words: str
) -> None:
    (violation,) = violations(edit).items()
    assert violation[0] == path
    assert words in violation[1]


@pytest.mark.parametrize(
    "edit",
    [
        regex("(" * 64 + "a" + ")" * 64),
        regex("()" * 100 + ")" * 100),
        regex("(a{100}){100}"),
        regex("(a{10}b{1000}){10}|c{10000}"),
        regex("a{10000}" * 10),
        regex(r"a\{99999}[{99999}]\u{99999}{a,99999}" + r"\(" * 65 + "[" + "(" * 65 + "]"),
        ebnf("(" * 64 + '"a"' + ")" * 64),
        ebnf('"' + "(" * 65 + '{99999}" [({99999}] a # ' + "(" * 65 + '\na ::= "b"{10000}'),
        document({"minItems": 10_000, "maxItems": 10_000}),
        document({"properties": {"minItems": {"maxLength": 1}, "pattern": {"type": "string"}}}),
        document({"allOf": [{"pattern": "(" * 60}, {"pattern": "(" * 60}]}),
        document({"allOf": [{"pattern": "a{9999}"}, {"pattern": "{2}"}]}),
    ],
)
def test_constraints_within_the_limits_are_accepted(edit: Edit) -> None:
    assert violations(edit) == {}


FORMS = [document({}), regex("a"), ebnf('"a"'), choices("a")]


@pytest.mark.parametrize("form", FORMS)
def test_a_constraint_excludes_ignore_eos_and_min_tokens(form: Edit) -> None:
    assert violations(form, put("stopping", "ignore_eos", True)).keys() == {"stopping.ignore_eos"}
    assert violations(form, put("stopping", "min_tokens", 1)).keys() == {"stopping.min_tokens"}
    assert violations(form, put("stopping", "min_tokens", 0)) == {}
    assert violations(put("stopping", "ignore_eos", True), put("stopping", "min_tokens", 1)) == {}


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (schema('{"a\0": 1}'), SCHEMA),
        (regex("a\0b"), PATTERN),
        (ebnf('"a\0"'), EBNF),
        (choices("a", "b\0"), "constraint.choice.choices[1]"),
    ],
)
def test_a_constraint_with_a_nul_is_rejected(form: Edit, path: str) -> None:
    assert violations(form) == {path: "must not contain the character U+0000"}
