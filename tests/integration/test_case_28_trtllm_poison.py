"""Case 28 with TensorRT-LLM: invalid grammars and failing requests do not affect other requests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from penstock.executor.trtllm.config import GuidedDecodingBackend
from penstock.executor.trtllm.constraint_check import fault_of
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import (
    Constraint,
    ConstraintKind,
    FailureReason,
    FinishReason,
    RequestSpec,
)
from support.trtllm_engine import (
    BuildHarness,
    TrtllmHarness,
    fake_module,
    greedy_spec,
    reference,
)

FAILED = FailureReason.EXECUTOR_REQUEST_FAILED
REJECTED = FailureReason.CONSTRAINT_REJECTED
END_ID = 2
FAIL_TOKEN = 7
BAD_CONSTRAINTS = [
    (
        ConstraintKind.REGEX,
        "(unclosed[",
        "[09:11:02] /project/cpp/regex_converter.cc:75: Regex parsing error at position 3:"
        " Unclosed '['",
    ),
    (
        ConstraintKind.GRAMMAR,
        "no rule is called so",
        "[09:11:02] /project/cpp/grammar_parser.cc:550: EBNF parser error at line 1, column 4:"
        " Expect ::=",
    ),
    (
        ConstraintKind.JSON_SCHEMA,
        '{"type": 7}',
        "[09:11:02] /project/cpp/json_schema_converter.cc:885: Check failed:"
        ' (schema_obj.at("type").is<std::string>()) is false: Type should be a string',
    ),
    (
        ConstraintKind.JSON_SCHEMA,
        '{"type": "internal memory"}',
        '[09:11:02] /project/cpp/json_schema_converter.cc:902: Unsupported type "internal memory"',
    ),
]
"""Each with the error message of xgrammar 0.1.25."""


class CharacterTokenizer:
    """A tokenizer with one token per character, which suffices for guided decoding."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 + 8 for letter in text]


def check_others(harness: TrtllmHarness, others: list[RequestSpec]) -> None:
    for spec in others:
        assert harness.finish(spec.key) is FinishReason.LENGTH
        assert harness.tokens(spec.key) == reference(
            harness, spec.prompt_ids.tolist(), spec.max_tokens
        )
    harness.check_clean()


@pytest.fixture
def guided(build: BuildHarness, monkeypatch: pytest.MonkeyPatch) -> BuildHarness:
    """Provide a builder of engines with guided decoding that receive constraints unchecked."""
    monkeypatch.setattr(fake_module("llmapi.llm"), "TokenizerBase", lambda *_: CharacterTokenizer())
    monkeypatch.setattr("penstock.executor.trtllm.engine.installed_checker", lambda: None)
    return partial(build, guided_decoding_backend=GuidedDecodingBackend.XGRAMMAR, max_batch_size=8)


@pytest.mark.parametrize(("kind", "constraint_text", "reason"), BAD_CONSTRAINTS)
def test_case_28_a_constraint_that_cannot_be_compiled_fails_only_its_request(
    kind: ConstraintKind, constraint_text: str, reason: str, guided: BuildHarness
) -> None:
    harness = guided(fake={"guided_error": reason})
    others = [greedy_spec(key, 3 + key, max_tokens=12) for key in (1, 2, 3)]
    bad = replace(
        greedy_spec(9, 4, max_tokens=12),
        constraint=Constraint(kind=kind, texts=(constraint_text,)),
        stop_ids=(END_ID,),
    )
    again = replace(bad, key=11, request_id="again")
    good = replace(
        bad,
        key=10,
        request_id="good",
        constraint=Constraint(kind=ConstraintKind.REGEX, texts=("ab",)),
        max_tokens=2,
    )
    harness.submit(others[0], bad, others[1])
    harness.turn()
    harness.iterate(2)

    harness.submit(again, others[2], good)
    harness.run_until_idle()

    assert (harness.failure(9), harness.failure(11)) == (REJECTED, REJECTED)
    assert harness.tokens(9) == harness.tokens(11) == []
    assert harness.tokens(10) == CharacterTokenizer().encode("ab")
    check_others(harness, others)


def test_case_28_a_hundred_bad_constraints_in_a_row_do_not_restart_an_idle_engine(
    guided: BuildHarness,
) -> None:
    kind, constraint_text, reason = BAD_CONSTRAINTS[2]
    harness = guided(fake={"guided_error": reason})
    bad = Constraint(kind=kind, texts=(constraint_text,))
    for key in range(1, 101):
        harness.submit(replace(greedy_spec(key, [5, 6]), constraint=bad, stop_ids=(END_ID,)))
        harness.run_until_idle()

    assert {harness.failure(key) for key in range(1, 101)} == {REJECTED}
    harness.check_clean()


class Grammar:
    """Stands in for xgrammar.Grammar. Its string is its source text; `from_regex` rejects every
    text.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    @classmethod
    def from_ebnf(cls, text: str) -> Grammar:
        return cls(text)

    @classmethod
    def from_regex(cls, text: str) -> Grammar:
        raise RuntimeError(f"Regex parsing error in {text}")


@pytest.mark.parametrize(
    ("kind", "constraint_text"),
    [(ConstraintKind.GRAMMAR, "root ::= root"), (ConstraintKind.REGEX, "(")],
    ids=["dead end", "not compiled"],
)
def test_case_28_a_constraint_that_would_end_the_engine_never_reaches_it(
    kind: ConstraintKind,
    constraint_text: str,
    guided: BuildHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker = SimpleNamespace(fault=partial(fault_of, Grammar), close=lambda: None)
    monkeypatch.setattr("penstock.executor.trtllm.engine.installed_checker", lambda: checker)
    harness = guided()
    others = [greedy_spec(key, 3 + key, max_tokens=12) for key in (1, 2, 3)]
    bad = replace(
        greedy_spec(9, 4),
        constraint=Constraint(kind=kind, texts=(constraint_text,)),
        stop_ids=(END_ID,),
    )
    good = replace(
        greedy_spec(10, 4, max_tokens=2),
        stop_ids=(END_ID,),
        constraint=Constraint(kind=ConstraintKind.GRAMMAR, texts=('root ::= "ab"',)),
    )
    harness.submit(*others, bad, good)
    harness.run_free()

    assert harness.failure(9) is REJECTED
    assert sorted(harness.submitted_keys) == [1, 2, 3, 10]
    assert harness.tokens(10) == CharacterTokenizer().encode("ab")
    check_others(harness, others)


def test_case_28_a_dead_end_that_reaches_the_engine_ends_it_at_once(
    guided: BuildHarness,
) -> None:
    harness = guided()
    dead_end = Constraint(kind=ConstraintKind.GRAMMAR, texts=("root ::= root",))
    harness.submit(
        greedy_spec(1, max_tokens=30),
        replace(greedy_spec(9, 4), constraint=dead_end, stop_ids=(END_ID,)),
    )
    harness.turn()
    harness.control.resume()
    harness.join_engine_loop()
    harness.settle()

    assert harness.llm._check_health(), "the engine itself does not notice"
    with pytest.raises(ExecutorDied, match="device-side assert"):
        harness.engine.step()


def test_case_28_a_request_that_the_engine_fails_does_not_affect_others(
    build: BuildHarness,
) -> None:
    harness = build(fake={"fail_tokens": [FAIL_TOKEN]}, max_batch_size=8)
    others = [greedy_spec(key, 3 + key, max_tokens=12) for key in (1, 2, 3)]
    poisoned = [greedy_spec(key, [*range(20, 23), FAIL_TOKEN], max_tokens=12) for key in (8, 9)]

    harness.submit(others[0], poisoned[0], others[1])
    harness.turn()
    harness.iterate(2)
    harness.submit(poisoned[1], others[2])
    harness.run_until_idle()

    assert [harness.failure(spec.key) for spec in poisoned] == [FAILED] * 2
    check_others(harness, others)
