"""Case 28 on TensorRT-LLM: grammars that cannot be compiled and requests it fails hurt nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.executor.trtllm.config import GuidedDecodingBackend
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.scheduler.request_options import Constraint, ConstraintKind
from support.trtllm_house import (
    Houses,
    TrtllmHouse,
    fake_module,
    greedy_spec,
    prompt_of,
    reference,
)

FAILED = FailureReason.EXECUTOR_REQUEST_FAILED
REFUSED = FailureReason.EXECUTOR_REFUSED
"""Where the engine says that what is wrong is the client's to put right."""
END_ID = 2
FAIL_TOKEN = 7
BAD_FORMS = [
    (ConstraintKind.REGEX, "(unclosed["),
    (ConstraintKind.GRAMMAR, "no rule is called so"),
    (ConstraintKind.JSON_SCHEMA, '{"type": 7}'),
    (ConstraintKind.JSON_SCHEMA, "no json"),
]


class Letters:
    """A tokenizer of one token per character, enough for guides."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 + 8 for letter in text]


def check_others(house: TrtllmHouse, others: list[RequestSpec]) -> None:
    for spec in others:
        assert house.finish(spec.key) is FinishReason.LENGTH
        assert house.tokens(spec.key) == reference(house, prompt_of(spec), spec.max_tokens)
    house.check_clean()


@pytest.mark.parametrize(("kind", "form"), BAD_FORMS)
def test_case_28_a_form_that_cannot_be_compiled_fails_its_request_alone(
    kind: ConstraintKind, form: str, build: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class: Any = fake_module("llmapi.llm").LLM
    monkeypatch.setattr(engine_class, "_load_tokenizer", lambda *_: Letters())
    house = build(guided_decoding_backend=GuidedDecodingBackend.XGRAMMAR, max_batch_size=8)
    others = [greedy_spec(key, 3 + key, max_tokens=12) for key in (1, 2, 3)]
    bad = replace(
        greedy_spec(9, 4, max_tokens=12),
        constraint=Constraint(kind=kind, texts=(form,)),
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
    house.submit(others[0], bad, others[1])
    house.turn()
    house.iterate(2)

    house.submit(again, others[2], good)
    house.run_until_idle()

    assert {house.failure(9), house.failure(11)} <= {FAILED, REFUSED}
    assert house.tokens(9) == house.tokens(11) == []
    assert house.tokens(10) == Letters().encode("ab")
    check_others(house, others)


def test_case_28_a_request_that_the_engine_fails_leaves_the_others_alone(build: Houses) -> None:
    house = build(fake={"fail_tokens": [FAIL_TOKEN]}, max_batch_size=8)
    others = [greedy_spec(key, 3 + key, max_tokens=12) for key in (1, 2, 3)]
    poisoned = [greedy_spec(key, [*range(20, 23), FAIL_TOKEN], max_tokens=12) for key in (8, 9)]

    house.submit(others[0], poisoned[0], others[1])
    house.turn()
    house.iterate(2)
    house.submit(poisoned[1], others[2])
    house.run_until_idle()

    assert [house.failure(spec.key) for spec in poisoned] == [FAILED] * 2
    check_others(house, others)
