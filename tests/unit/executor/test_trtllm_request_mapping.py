"""How a request becomes arguments of the engine, and which requests are rejected."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.trtllm.config import (
    SamplerOption,
    TrtllmConfig,
)
from penstock.scheduler.request import CacheRetention, ConstraintKind
from unit.executor.trtllm_recorder import (
    SAMPLING_FIELDS,
    recording_package,
)
from unit.executor.trtllm_requests import (
    VOCAB,
    arguments,
    constrained,
    mapping,
    params,
    sampled,
    spec,
)

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the torch extra is not installed"
)


# The arguments of every request.


def test_a_plain_request_passes_these_arguments_and_no_others() -> None:
    reported = arguments(spec(hash_salt=b"\xff\x00a", stop_ids=(2,)))
    made = reported.pop("sampling_params")
    assert reported == {"inputs": [5, 6, 7], "streaming": True, "cache_salt": "ff0061"}
    assert made.arguments == {
        "n": 1,
        "max_tokens": 20,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "end_id": 2,
        "pad_id": 2,
        "ignore_eos": False,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
    }


def test_token_ids_are_pythons_own_integers() -> None:
    """A list of numpy integers would be pickled as one object per token."""
    inputs = arguments(spec(), [8])["inputs"]
    assert type(inputs) is list
    assert {type(token) for token in inputs} == {int}


def test_every_call_makes_new_objects() -> None:
    engine, asked = mapping(), constrained(ConstraintKind.REGEX, "a+", retention=CacheRetention())
    first, second = arguments(asked, engine=engine), arguments(asked, engine=engine)
    for name in ("inputs", "sampling_params", "kv_cache_retention_config"):
        assert first[name] is not second[name]
    assert (
        first["sampling_params"]["guided_decoding"]
        is not second["sampling_params"]["guided_decoding"]
    )


def test_drawing_is_always_explicit_because_its_absence_means_greedy() -> None:
    made = params(sampled(temperature=0.0))
    assert (made["temperature"], made["top_k"], made["top_p"]) == (0.0, 0, 1.0)
    made = params(sampled(temperature=0.5, top_k=7, top_p=0.25, seed=2**64 - 1))
    assert (made["temperature"], made["top_k"], made["top_p"]) == (0.5, 7, 0.25)
    assert made["seed"] == 2**64 - 1


# How much, and what was generated before.


def test_output_from_before_is_prompt_to_the_engine_and_counts_for_us() -> None:
    reported = arguments(spec(max_tokens=20, min_tokens=6, stop_ids=(2,)), [11, 12])
    assert reported["inputs"] == [5, 6, 7, 11, 12]
    assert reported["sampling_params"]["max_tokens"] == 18
    assert reported["sampling_params"]["min_tokens"] == 4


def test_replayed_tokens_count_like_those_before_a_preemption() -> None:
    asked = spec([5, 6, 7, 11, 12], max_tokens=20, min_tokens=6, num_replayed=2, stop_ids=(2,))
    made = params(asked, [13])
    assert made["max_tokens"] == 17
    assert made["min_tokens"] == 3


@given(
    num_prompt=st.integers(1, 30),
    num_replayed=st.integers(0, 10),
    num_output=st.integers(0, 10),
    max_tokens=st.integers(21, 60),
    min_tokens=st.integers(0, 21),
)
def test_the_total_never_changes_whatever_came_before(
    num_prompt: int, num_replayed: int, num_output: int, max_tokens: int, min_tokens: int
) -> None:
    asked = spec(
        [5] * (num_prompt + num_replayed),
        num_replayed=num_replayed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=(2,),
    )
    reported = arguments(asked, [6] * num_output)
    made = reported["sampling_params"]
    assert len(reported["inputs"]) + made["max_tokens"] == asked.max_total_tokens
    num_generated = num_replayed + num_output
    assert made.arguments.get("min_tokens", 0) == max(0, min_tokens - num_generated)


def test_nothing_left_to_generate_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        arguments(spec(max_tokens=2), [8, 9])


# Stops.


def test_without_stops_the_engine_ignores_the_end_and_asks_no_tokenizer() -> None:
    made = params(spec(stop_ids=()))
    assert made["ignore_eos"] is True
    assert made["end_id"] == -1
    assert made["pad_id"] is not None
    assert "stop_token_ids" not in made


def test_the_models_own_end_is_the_end_id_and_the_others_are_stop_ids() -> None:
    """The front appends the model's end-of-sequence ids last. Before `min_tokens`, the engine
    suppresses only its `end_id`.
    """
    made = params(spec(stop_ids=(30, 31, 2)))
    assert (made["end_id"], made["stop_token_ids"], made["ignore_eos"]) == (2, [30, 31], False)


def test_while_min_tokens_is_ahead_only_the_end_id_is_passed() -> None:
    asked = spec(stop_ids=(30, 2), min_tokens=2)
    assert "stop_token_ids" not in params(asked, [9])
    assert params(asked, [9])["end_id"] == 2
    assert params(asked, [9, 9])["stop_token_ids"] == [30]
    assert "min_tokens" not in params(asked, [9, 9])


def test_stop_strings_never_reach_the_engine() -> None:
    assert not {"stop", "bad"} & params(spec(stop_ids=(30, 2))).arguments.keys()


# What a sampler may ignore.


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("repetition_penalty", 1.5, 1.0),
        ("presence_penalty", -0.5, 0.0),
        ("frequency_penalty", 0.25, 0.0),
    ],
)
def test_a_penalty_is_passed_when_it_has_an_effect(name: str, value: float, off: float) -> None:
    assert name not in params(sampled(**{name: off}))
    assert params(sampled(**{name: value}))[name] == value
    with pytest.raises(ValueError, match=name):
        arguments(sampled(**{name: value}), engine=mapping(TrtllmConfig()))


def test_presence_and_frequency_leave_the_prompt_out_but_not_earlier_output() -> None:
    asked = replace(
        sampled(presence_penalty=1.0), prompt_ids=np.full(5, 9, np.int32), num_replayed=2
    )
    assert params(asked, [8])["prompt_ignore_length"] == 3
    assert "prompt_ignore_length" not in params(sampled(repetition_penalty=1.5))


def test_a_version_without_prompt_ignore_length_does_not_receive_it() -> None:
    package = recording_package(sampling_fields=SAMPLING_FIELDS - {"prompt_ignore_length"})
    made = params(sampled(presence_penalty=1.0), engine=mapping(package=package))
    assert made["presence_penalty"] == 1.0
    assert "prompt_ignore_length" not in made


def test_min_tokens_is_rejected_where_it_would_bar_nothing() -> None:
    asked = spec(min_tokens=1, stop_ids=(2,))
    with pytest.raises(ValueError, match="min_tokens"):
        arguments(asked, engine=mapping(TrtllmConfig()))
    arguments(asked, [8], engine=mapping(TrtllmConfig()))


def test_without_stop_ids_there_is_nothing_to_bar() -> None:
    asked = spec(max_tokens=4, min_tokens=4)
    reported = arguments(asked, engine=mapping(TrtllmConfig()))
    assert "min_tokens" not in reported["sampling_params"].arguments


def test_min_p_is_passed_where_it_is_honoured_and_rejected_elsewhere() -> None:
    assert "min_p" not in params(sampled(min_p=0.0))
    assert params(sampled(min_p=0.1))["min_p"] == 0.1
    vouched = TrtllmConfig(sampler_honours=(SamplerOption.MIN_P,))
    assert params(sampled(min_p=0.1), engine=mapping(vouched))["min_p"] == 0.1
    with pytest.raises(ValueError, match="min_p"):
        arguments(sampled(min_p=0.1), engine=mapping(TrtllmConfig()))


@pytest.mark.parametrize(("ours", "engines"), [(0, 1), (1, 1), (5, 5)])
def test_logprobs_never_ask_for_zero_which_is_off(ours: int, engines: int) -> None:
    assert "logprobs" not in params(spec())
    assert params(sampled(num_logprobs=ours))["logprobs"] == engines


@pytest.mark.parametrize(
    ("version", "asked", "passed"),
    [
        ("1.2.1", 0.99999, 0.99999),
        ("1.3.0rc9", 0.99999, 1.0),
        ("1.4.0", 0.9999, 1.0),
        ("1.3.0", 0.99, 0.99),
    ],
)
def test_later_versions_never_get_a_top_p_next_to_one(
    version: str, asked: float, passed: float
) -> None:
    engine = mapping(package=recording_package(version=version))
    assert params(sampled(top_p=asked), engine=engine)["top_p"] == passed


def test_prompt_logprobs_are_rejected() -> None:
    with pytest.raises(ValueError, match="num_prompt_logprobs"):
        arguments(sampled(num_prompt_logprobs=0))


@needs_torch
def test_a_logit_bias_is_a_dense_float32_tensor() -> None:
    import torch

    bias = params(sampled(logit_bias=((3, -100.0), (999, 2.5))))["embedding_bias"]
    assert (bias.dtype, tuple(bias.shape)) == (torch.float32, (VOCAB,))
    assert {int(i): float(bias[i]) for i in bias.nonzero()} == {3: -100.0, 999: 2.5}


@needs_torch
@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_bias_for_no_token_is_rejected(token_id: int) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        arguments(sampled(logit_bias=((token_id, 1.0),)))
