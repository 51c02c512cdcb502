"""Options that only some executors support (constraint, adapter, retention): their limits, and the
rejection of options that the executor lacks.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from penstock.scheduler.executor import Feature
from penstock.scheduler.request import CacheRetention, Constraint, ConstraintKind
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.constraint import MAX_DEPTH
from penstock.server.rpc.mapping_in.generation import num_lowered_priorities, read_generation
from penstock.server.tenants import PriorityCeilings
from penstock.v1.generation_service_pb2 import GenerateRequest
from support.fronts import INFO, rejected
from support.generate_requests import text_request
from support.request_edits import (
    Edit,
    adapter,
    choices,
    edited,
    grammar,
    nested,
    put,
    regex,
    retention,
    schema,
)

LIMITS = Limits.from_config(FrontConfig(max_constraint_bytes=200), INFO)
NAN, INF = math.nan, math.inf


def read(message: GenerateRequest, limits: Limits = LIMITS) -> GenerationSpec:
    return read_generation(message, limits, ("tiny",))


OFF_BY_RANGE: list[tuple[str, Edit, str]] = [
    *[
        (f"schema {text[:20]}", schema(text), "constraint.json_schema.schema")
        for text in (
            *("", "{", "nul", "{'a': 1}", "[]", "1", '"x"', "null", "NaN"),
            *('{"maximum": NaN}', '{"minimum": -Infinity}', "{}" + " " * 199, "[" * 200),
        )
    ],
    *[
        (f"pattern {text[:20]}", regex(text), "constraint.regex.pattern")
        for text in (
            *("", "é" * 101, "a(?=b)", "a(?!b)", "(?<=a)b", "(?<!a)b", r"(a)\1", r"(?P<x>a)(?P=x)"),
            *(r"(?<x>a)\k<x>", r"[a\]](?=b)", r"\\(?=b)"),
        )
    ],
    *[
        (f"grammar {text[:20]}", grammar(text), "constraint.grammar.ebnf")
        for text in ("", "main ::= 'a'", "# root ::= 'a'", "a ::= root", "root ::= " + "x" * 200)
    ],
    ("no choices", choices(), "constraint.choice.choices"),
    ("empty choice", choices("a", ""), "constraint.choice.choices[1]"),
    ("choice twice", choices("a", "b", "a"), "constraint.choice.choices[2]"),
    ("long choices", choices("a" * 100, "é" * 51), "constraint.choice.choices"),
    ("retention level", retention(level=101), "cache.retention.level"),
    ("retention of no time", retention(seconds=0), "cache.retention.duration"),
    ("retention of negative time", retention(seconds=-1), "cache.retention.duration"),
    ("adapter without name", adapter(None), "adapter.name"),
    ("empty adapter name", adapter(""), "adapter.name"),
    *[
        (f"adapter scale {scale}", adapter("poet", scale), "adapter.scale")
        for scale in (NAN, INF, -4.1, 4.1)
    ],
]


@pytest.mark.parametrize(
    ("edit", "path"), [pytest.param(edit, path, id=name) for name, edit, path in OFF_BY_RANGE]
)
def test_an_invalid_value_is_named(edit: Edit, path: str) -> None:
    with rejected(ErrorReason.INVALID_ARGUMENT) as caught:
        read(edited(edit))
    assert [violation.path for violation in caught.value.failure.violations] == [path]


def test_the_place_in_a_schema_that_is_not_json_is_reported() -> None:
    with rejected(ErrorReason.INVALID_ARGUMENT) as caught:
        read(edited(schema('{"type":\n "object"')))
    [violation] = caught.value.failure.violations
    assert violation.description == "must be a JSON document; line 2, column 10 is not JSON"


AT_THE_EDGE: list[Edit] = [
    schema("{}"),
    schema("true"),
    schema(" false\n"),
    schema('{"enum": ["(?=", "' + "x" * 176 + '"]}'),
    regex("a" * 200),
    regex(r"[(?=a)]\(?=[^\]\[(?!](?:b)(?i)(?P<n>c)\0\d"),
    regex("["),
    grammar("root ::= 'a'"),
    grammar("a ::= 'x'\n  root\n ::= a | root a\n"),
    choices("a" * 200),
    choices("a", "A", " a"),
    retention(level=0, seconds=1),
    retention(level=100),
    adapter("pirate", 1.0),
]


@pytest.mark.parametrize("edit", AT_THE_EDGE)
def test_the_edges_are_allowed(edit: Edit) -> None:
    read(edited(edit))


@pytest.mark.parametrize(
    ("edit", "feature", "path"),
    [
        (put("sampling", "seed", 0), Feature.SEED, "sampling.seed"),
        (put("sampling", "min_p", 0.5), Feature.MIN_P, "sampling.min_p"),
        (put("stopping", "min_tokens", 1), Feature.MIN_TOKENS, "stopping.min_tokens"),
        (schema("not JSON"), Feature.JSON_SCHEMA, "constraint.json_schema"),
        (regex(""), Feature.REGEX, "constraint.regex"),
        (grammar(""), Feature.GRAMMAR, "constraint.grammar"),
        (choices(), Feature.CHOICE, "constraint.choice"),
        (adapter("nobody"), Feature.ADAPTERS, "adapter"),
        (retention(), Feature.CACHE_RETENTION, "cache.retention"),
    ],
)
def test_each_missing_feature_is_reported_with_its_path(
    edit: Edit, feature: Feature, path: str
) -> None:
    limits = replace(LIMITS, features=INFO.features - {feature})
    with rejected(ErrorReason.FEATURE_UNSUPPORTED) as caught:
        read(edited(edit), limits)
    assert caught.value.failure.metadata == {"feature": feature.value, "field": path}


def test_sessions_need_an_executor_whose_blocks_can_be_kept() -> None:
    asked = edited(put("cache", "session_id", "mine"))
    assert read(asked).session_id == "mine"
    with rejected(ErrorReason.FEATURE_UNSUPPORTED) as caught:
        read(asked, replace(LIMITS, features=INFO.features - {Feature.CACHE_RETENTION}))
    assert caught.value.failure.metadata == {"feature": "sessions", "field": "cache.session_id"}


@pytest.mark.parametrize("session_id", ["", "a" * 129])
def test_the_name_of_a_session_is_bounded(session_id: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(edited(put("cache", "session_id", session_id)))
    (violation,) = caught.value.failure.violations
    assert violation.path == "cache.session_id"


@pytest.mark.parametrize(
    ("edit", "path"),
    [(put("cache", "session_id", "a"), "cache.session_id"), (retention(), "cache.retention")],
)
def test_prompt_logprobs_exclude_sessions_and_retention(edit: Edit, path: str) -> None:
    message = edited(edit)
    message.output.prompt_logprobs = 0
    with pytest.raises(RequestError) as caught:
        read(message)
    (violation,) = caught.value.failure.violations
    assert violation.path == path
    assert "output.prompt_logprobs" in violation.description


@pytest.mark.parametrize(("wanted", "kept"), [(100, 40), (40, 40), (7, 7)])
def test_a_retention_priority_above_the_tenants_is_lowered(wanted: int, kept: int) -> None:
    message = edited(retention(level=wanted))
    ceilings = PriorityCeilings(retention=40)
    generation = read_generation(message, LIMITS, ("tiny",), ceilings=ceilings)
    assert generation.retention is not None
    assert generation.retention.level == kept
    assert num_lowered_priorities(message, ceilings) == (wanted > kept)


def test_an_adapter_scale_other_than_one_is_rejected() -> None:
    assert read(edited(adapter("poet", 1.0))) == read(edited(adapter("poet")))
    with rejected(ErrorReason.FEATURE_UNSUPPORTED) as caught:
        read(edited(adapter("poet", 0.5)))
    assert caught.value.failure.metadata == {"feature": "adapters", "field": "adapter.scale"}


def test_an_unknown_adapter_is_not_found() -> None:
    with rejected(ErrorReason.ADAPTER_NOT_FOUND) as caught:
        read(edited(adapter("Poet")))
    assert caught.value.failure.metadata == {"adapter": "Poet"}


def test_a_schema_may_be_nested_so_deep_and_no_deeper() -> None:
    limits = replace(LIMITS, config=FrontConfig())
    deepest = nested(MAX_DEPTH)
    assert read(edited(schema(deepest)), limits).constraint == Constraint(
        kind=ConstraintKind.JSON_SCHEMA, texts=(deepest,)
    )
    for depth in (MAX_DEPTH + 1, 8000):
        with pytest.raises(RequestError) as caught:
            read(edited(schema(nested(depth))), limits)
        (violation,) = caught.value.failure.violations
        assert violation.path == "constraint.json_schema.schema"
        assert "64 deep" in violation.description
    assert json.loads(deepest)


def test_executor_options_are_read_as_they_were_sent() -> None:
    generation = read(edited(retention(level=90, seconds=60)))
    assert generation.retention == CacheRetention(level=90, duration_s=60.0)
    assert read(edited(retention())).retention == CacheRetention()
    assert read(edited(choices("b", "a"))).constraint == Constraint(
        kind=ConstraintKind.CHOICE, texts=("b", "a")
    )
    assert read(edited(adapter("poet"))).adapter == "poet"
    plain = read(text_request())
    assert (plain.adapter, plain.constraint, plain.retention) == ("", None, None)


HOSTILE = [
    regex("[" * 200_000),
    regex("[\\" * 60_000),
    grammar("\n" * 200_000),
    grammar("root" + " " * 200_000),
    grammar("root ::= " + '"' * 200_000),
    grammar("root ::= " + "{ " * 100_000),
    regex("()" * 100_000),
    regex("{" + " " * 200_000),
    regex("{ " * 100_000),
    regex("a{" + "9" * 200_000 + "}"),
    schema("[" * 200_000),
    schema("1" * 200_000),
]


@pytest.mark.parametrize("edit", HOSTILE)
def test_a_hostile_constraint_takes_no_time(edit: Edit) -> None:
    limits = replace(LIMITS, config=FrontConfig(max_constraint_bytes=1 << 20))
    try:
        read(edited(edit), limits)
    except RequestError as error:
        assert error.reason is ErrorReason.INVALID_ARGUMENT  # noqa: PT017  # may also be accepted
