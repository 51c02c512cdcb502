"""How constraints, cache options and adapters of a request become arguments of the engine, and
which of them are rejected.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.trtllm.config import (
    GuidedDecodingBackend,
    TrtllmConfig,
)
from penstock.executor.trtllm.request_mapping import NotResumable
from penstock.scheduler.request import CacheRetention, ConstraintKind
from unit.executor.trtllm_recorder import (
    GENERATE_ARGUMENTS,
    recording_package,
)
from unit.executor.trtllm_requests import (
    FULL,
    NO_REUSE,
    VOCAB,
    arguments,
    constrained,
    mapping,
    params,
    spec,
)

# Forms.


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ConstraintKind.JSON_SCHEMA, "json"),
        (ConstraintKind.REGEX, "regex"),
        (ConstraintKind.GRAMMAR, "grammar"),
    ],
)
def test_a_constraint_goes_into_the_field_of_its_language(kind: ConstraintKind, field: str) -> None:
    assert params(constrained(kind, "{}"))["guided_decoding"].arguments == {field: "{}"}


@given(st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1), min_size=1))
def test_a_choice_is_a_regex_that_matches_its_texts(texts: list[str]) -> None:
    guide = params(constrained(ConstraintKind.CHOICE, *texts))["guided_decoding"]
    assert guide.arguments.keys() == {"regex"}
    assert all(re.fullmatch(guide["regex"], text) for text in texts)


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_is_rejected_without_a_backend(kind: ConstraintKind) -> None:
    with pytest.raises(ValueError, match="constraint"):
        arguments(constrained(kind, "a"), engine=mapping(TrtllmConfig()))


@pytest.mark.parametrize("kind", [ConstraintKind.GRAMMAR, ConstraintKind.REGEX])
def test_constraints_that_cannot_be_checked_are_rejected_with_llguidance(
    kind: ConstraintKind,
) -> None:
    engine = mapping(TrtllmConfig(guided_decoding_backend=GuidedDecodingBackend.LLGUIDANCE))
    with pytest.raises(ValueError, match="constraint"):
        arguments(constrained(kind, 'root ::= "a"'), engine=engine)
    arguments(constrained(ConstraintKind.CHOICE, "a", "b"), engine=engine)


def test_a_constraint_is_not_begun_again_in_the_middle() -> None:
    with pytest.raises(NotResumable, match="constraint"):
        arguments(constrained(ConstraintKind.REGEX, "a+"), [8])


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"stop_ids": ()}, "stop_ids"), ({"min_tokens": 1}, "min_tokens")],
)
def test_a_constraint_must_be_able_to_end(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        arguments(constrained(ConstraintKind.REGEX, "a+", **changes))


def test_a_constraint_with_a_nul_would_be_cut_short() -> None:
    with pytest.raises(ValueError, match="constraint"):
        arguments(constrained(ConstraintKind.CHOICE, "yes", "no\0thing"))


# Which requests share cached blocks.


@given(st.binary(min_size=1), st.binary(min_size=1))
def test_salts_of_the_engine_differ_exactly_where_salts_of_requests_do(
    first: bytes, second: bytes
) -> None:
    engine = mapping()
    salts = [
        arguments(spec(hash_salt=salt), engine=engine)["cache_salt"] for salt in (first, second)
    ]
    assert (salts[0] == salts[1]) is (first == second)


def test_an_unshared_request_has_a_unique_salt() -> None:
    engine, asked = mapping(), spec(hash_salt=b"", key=0xAB)
    salts = [arguments(asked, engine=engine)["cache_salt"] for _ in range(3)]
    assert len(set(salts)) == 3
    assert not any(re.fullmatch("[0-9a-f]*", salt) for salt in salts)


def test_reuse_without_salts_is_rejected_at_the_start() -> None:
    package = recording_package(generate_arguments=GENERATE_ARGUMENTS - {"cache_salt"})
    with pytest.raises(ValueError, match="cache_salt"):
        mapping(package=package)
    reported = arguments(spec(), engine=mapping(replace(FULL, kv_cache_config=NO_REUSE), package))
    assert "cache_salt" not in reported


# The rest of the arguments.


def test_an_adapter_goes_by_name() -> None:
    assert "lora_request" not in arguments(spec())
    assert arguments(spec(adapter="tax"))["lora_request"].arguments == {
        "lora_name": "tax",
        "lora_int_id": 7,
        "lora_path": "/loras/tax",
    }
    with pytest.raises(ValueError, match="adapter"):
        arguments(spec(adapter="tex"))


@pytest.mark.parametrize("missing", ["lora_request", "streaming"])
def test_a_version_without_an_argument_that_is_needed_is_rejected(missing: str) -> None:
    package = recording_package(generate_arguments=GENERATE_ARGUMENTS - {missing})
    with pytest.raises(ValueError, match=missing):
        mapping(package=package)


@pytest.mark.parametrize(
    ("duration_s", "duration"),
    [
        (90.0, timedelta(seconds=90)),
        (math.inf, None),
        # More nanoseconds than the engine's clock can hold.
        (3.0e11, None),
    ],
)
def test_retention_holds_for_the_prompt_and_the_output(
    duration_s: float, duration: timedelta | None
) -> None:
    asked = spec(retention=CacheRetention(level=80, duration_s=duration_s))
    config = arguments(asked)["kv_cache_retention_config"]
    (prompt,) = config["token_range_retention_configs"]
    assert prompt.arguments == {
        "token_start": 0,
        "token_end": None,
        "priority": 80,
        "duration_ms": duration,
    }
    assert config["decode_retention_priority"] == 80
    assert config["decode_duration_ms"] == duration


def test_retention_has_no_effect_without_reuse() -> None:
    engine = mapping(replace(FULL, kv_cache_config=NO_REUSE))
    with pytest.raises(ValueError, match="retention"):
        arguments(spec(retention=CacheRetention()), engine=engine)


@pytest.mark.parametrize(("ours", "engines"), [(-100, 0.0), (0, 0.5), (100, 1.0)])
def test_priority_is_passed_to_versions_that_take_it(ours: int, engines: float) -> None:
    newer = mapping(package=recording_package(generate_arguments=GENERATE_ARGUMENTS | {"priority"}))
    assert arguments(spec(priority=ours), engine=newer)["priority"] == engines
    assert "priority" not in arguments(spec(priority=ours))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_rejected_by_place(token: int) -> None:
    with pytest.raises(ValueError, match=re.escape("prompt_ids[1]")):
        arguments(spec([5, token]))


def test_no_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="prompt_ids"):
        mapping().arguments(spec(), np.zeros(0, dtype=np.int32))
