"""How the executor handles the peculiarities of TensorRT-LLM's results, parameters and errors."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.executor.trtllm.config import (
    CapacityPolicy,
    DecodingType,
    SpeculativeSettings,
)
from penstock.scheduler.request import FailureReason, FinishReason
from support.trtllm_engine import (
    MAX_SEQ_LEN,
    VOCAB,
    BuildHarness,
    fake_module,
    greedy_spec,
    reference,
    wrapped,
)


def test_a_cumulative_result_gives_every_token_once_at_any_lag(build: BuildHarness) -> None:
    harness = build()
    specs = [greedy_spec(key, 3 + key, max_tokens=12 + key) for key in (1, 2, 3)]
    harness.submit(*specs)
    harness.turn()
    for num_iterations in (1, 5, 2, 30):
        # The result object changes this many times before it is read.
        for _ in range(num_iterations):
            harness.control.step()
        harness.settle()
        harness.turn()

    assert [harness.tokens(spec.key) for spec in specs] == [
        reference(harness, spec.prompt_ids.tolist(), spec.max_tokens) for spec in specs
    ]
    harness.check_clean()


def test_several_waiting_responses_become_one_step(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=9))
    harness.turn()
    harness.iterate(4)
    events = harness.engine.step()

    assert events.keys.tolist() == [1] * 4
    assert events.tokens.tolist() == reference(harness, greedy_spec(1).prompt_ids.tolist(), 4)


def test_token_ids_may_shrink_on_the_last_item(
    build: BuildHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build()
    model_tokens = reference(harness, greedy_spec(1).prompt_ids.tolist(), 8)
    num_seen: list[int] = []

    def cut(finish: Any, result: Any, output: Any, response: Any) -> None:
        num_seen.append(len(output.token_ids))
        finish(result, output, response)
        output.token_ids = output.token_ids[:-3]
        num_seen.append(len(output.token_ids))

    result_class = fake_module("executor.result").RequestOutput
    wrapped(monkeypatch, result_class, "_finish", cut)
    # The engine ends the output for a reason that the adapter cannot detect.
    wrapped(
        monkeypatch,
        fake_module("_torch.pyexecutor.llm_request").LlmRequest,
        "end_of",
        lambda end_of, request, token, most: 2 if token == model_tokens[5] else end_of(
            request, token, most
        ),
    )  # fmt: skip
    harness.submit(greedy_spec(1, max_tokens=20, stop_ids=(VOCAB - 1,)))
    harness.run_until_idle()

    assert num_seen == [6, 3]
    # Five tokens preceded the last response; the sixth was in it and is cut off.
    assert harness.tokens(1) == model_tokens[:5]
    assert harness.finish(1) is FinishReason.STOP
    harness.check_clean()


def test_several_tokens_per_response(build: BuildHarness) -> None:
    draft = SpeculativeSettings(decoding_type=DecodingType.NGRAM, max_draft_len=3)
    harness = build(speculative_config=draft)
    specs = [greedy_spec(key, 2 + key, max_tokens=15 + key) for key in (1, 2, 3)]
    harness.submit(*specs)
    harness.turn()
    most = 0
    for _ in range(60):
        harness.iterate()
        events = harness.engine.step()
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            harness.outcomes[key].tokens.append(token)
        most = max([most, *(events.keys.tolist().count(key) for key in (1, 2, 3))])
        harness.settle()

    assert most > 1
    assert [harness.tokens(spec.key) for spec in specs] == [
        reference(harness, spec.prompt_ids.tolist(), spec.max_tokens) for spec in specs
    ]
    harness.check_clean()


def test_max_tokens_is_never_reduced_silently(build: BuildHarness) -> None:
    harness = build()
    fits = greedy_spec(1, 20, max_tokens=MAX_SEQ_LEN - 20)
    harness.submit(fits, greedy_spec(2, 20, max_tokens=MAX_SEQ_LEN - 19))
    harness.run_until_idle()

    assert len(harness.tokens(1)) == fits.max_tokens
    assert harness.failure(2) is FailureReason.PROMPT_TOO_LONG
    assert harness.submitted_keys == [1]


def test_a_resumed_request_is_limited_to_what_it_may_still_generate(build: BuildHarness) -> None:
    harness = build(num_blocks=12, max_batch_size=3, policy=CapacityPolicy.MAX_UTILIZATION)
    specs = [greedy_spec(key, 8, max_tokens=16) for key in (1, 2, 3)]
    harness.submit(*specs)
    harness.run_until_idle()

    assert sum(outcome.num_preemptions for outcome in harness.outcomes.values()) > 0
    reported = harness.submitted
    assert {len(item.prompt_token_ids) + item.sampling_params.max_tokens for item in reported} == {
        24
    }
    assert [harness.tokens(spec.key) for spec in specs] == [
        reference(harness, spec.prompt_ids.tolist(), 16) for spec in specs
    ]
    harness.check_clean()


def test_sampling_params_are_never_used_twice(build: BuildHarness) -> None:
    harness = build(num_blocks=12, max_batch_size=3, policy=CapacityPolicy.MAX_UTILIZATION)
    same = [greedy_spec(key, [7, 8, 9, 10, 11, 12, 13, 14], max_tokens=16) for key in (1, 2, 3, 4)]
    harness.submit(*same)
    harness.run_until_idle()

    params = [item.sampling_params for item in harness.control.submitted]
    assert len(params) > 1 + len(same)
    assert len({id(each) for each in params}) == len(params)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("forward failed", FailureReason.EXECUTOR_REQUEST_FAILED),
        ("Token ID out of range", FailureReason.EXECUTOR_REJECTED),
        ("The prompt length (9) exceeds max_seq_len (8)", FailureReason.EXECUTOR_REJECTED),
    ],
)
def test_a_request_error_from_iteration_fails_only_its_request(
    build: BuildHarness, message: str, reason: FailureReason
) -> None:
    bad, good = greedy_spec(1, max_tokens=9), greedy_spec(2, max_tokens=9)
    harness = build(fake={"fail_tokens": [bad.prompt_ids.tolist()[2]], "fail_message": message})
    harness.submit(bad, good)
    harness.run_until_idle()

    assert harness.failure(1) is reason
    assert harness.tokens(1) == []
    assert harness.tokens(2) == reference(harness, good.prompt_ids.tolist(), 9)
    assert list(harness.control.aborted) == []
    harness.check_clean()


def test_a_request_error_after_output_ends_the_request(build: BuildHarness) -> None:
    harness = build(fake={"fail_at_output": 4})
    harness.submit(greedy_spec(1, max_tokens=9))
    harness.run_until_idle()

    assert harness.failure(1) is FailureReason.EXECUTOR_REQUEST_FAILED
    assert harness.tokens(1) == reference(harness, greedy_spec(1).prompt_ids.tolist(), 4)
    harness.check_clean()


def test_a_general_error_fails_the_running_requests_and_no_others(build: BuildHarness) -> None:
    harness = build(max_batch_size=2)
    harness.submit(*(greedy_spec(key, max_tokens=6) for key in (1, 2, 3)))
    harness.round(2)
    harness.control.inject("fail_all")
    harness.control.wait_for_iteration(harness.view().iteration + 1)
    harness.settle()
    harness.run_until_idle()

    assert harness.failure(1) is FailureReason.EXECUTOR_REQUEST_FAILED
    assert harness.failure(2) is FailureReason.EXECUTOR_REQUEST_FAILED
    assert harness.tokens(3) == reference(harness, greedy_spec(3).prompt_ids.tolist(), 6)
    harness.check_clean()


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("RequestError", "no", FailureReason.EXECUTOR_REQUEST_FAILED),
        ("RequestError", "Token ID out of range", FailureReason.EXECUTOR_REJECTED),
        ("ValueError", "no", FailureReason.EXECUTOR_REQUEST_FAILED),
        ("TypeError", "unexpected keyword", FailureReason.EXECUTOR_REQUEST_FAILED),
    ],
)
def test_an_error_at_submission_fails_only_its_request(
    build: BuildHarness,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    text: str,
    reason: FailureReason,
) -> None:
    harness = build()
    errors = {
        "RequestError": fake_module("executor.request").RequestError,
        "ValueError": ValueError,
        "TypeError": TypeError,
    }

    def reject(generate: Any, llm: Any, **arguments: Any) -> Any:
        if arguments["inputs"][0] == 100:
            raise errors[kind](text)
        return generate(llm, **arguments)

    wrapped(monkeypatch, type(harness.llm), "generate_async", reject)
    harness.submit(greedy_spec(1), greedy_spec(2))
    harness.run_until_idle()

    assert harness.failure(1) is reason
    assert harness.finish(2) is FinishReason.LENGTH
    harness.check_clean()


def test_a_stop_by_text_aborts_a_request_that_would_continue(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, max_tokens=50))
    harness.round(4)
    # The front has found the stop string in the text.
    assert harness.engine.cancel(1, FinishReason.STOP)
    harness.run_until_idle()

    assert harness.finish(1) is FinishReason.STOP
    assert len(harness.control.aborted) == 1
    assert harness.view().iteration < 20
    harness.check_clean()


def test_the_engine_never_detokenises_or_checks_stop_strings(build: BuildHarness) -> None:
    harness = build()
    harness.submit(greedy_spec(1, stop_ids=(5, 6)))
    harness.run_until_idle()

    (reported,) = harness.submitted
    assert reported.sampling_params.detokenize is False
    assert reported.sampling_params.stop is None
    assert reported.sampling_params.include_stop_str_in_output is True
    assert reported.streaming is True
