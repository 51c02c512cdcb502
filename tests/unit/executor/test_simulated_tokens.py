"""Which inputs determine the tokens that the simulated executor generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.executor.config import SimulatedConfig
from penstock.executor.models import resolve_model
from penstock.executor.simulated.tokens import (
    simulated_logprobs,
    tokens_at,
)
from penstock.executor.simulated.vocabulary import generated_ids
from penstock.scheduler.request import RequestSpec, SamplingParams
from support.core import make_spec
from support.simulated_output import simulated_output, simulated_token

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def spec_of(prompt: NDArray[np.int32], **fields: Any) -> RequestSpec:
    given = {"max_tokens": 8, "sampling": GREEDY, **fields}
    return make_spec(1, prompt.tolist(), hashed=False, **given)


def test_a_token_depends_on_all_of_the_prompt_and_on_the_position() -> None:
    prompts = [ids(1, 2, 3, 4), ids(9, 2, 3, 4), ids(1, 2, 3, 9), ids(1, 3, 2, 4), ids(1, 2, 3)]

    outputs = {tuple(simulated_token(p, at, VOCAB) for at in range(4, 12)) for p in prompts}

    assert len(outputs) == len(prompts)
    assert all(len(set(output)) > 1 for output in outputs)


def test_the_seed_counts_only_when_sampling() -> None:
    def output(temperature: float, seed: int) -> NDArray[np.int32]:
        sampling = SamplingParams(temperature=temperature, seed=seed)
        return simulated_output(spec_of(ids(1, 2), sampling=sampling), VOCAB)

    greedy, sampled = ([output(temperature, seed) for seed in (1, 2)] for temperature in (0.0, 0.7))

    assert np.array_equal(greedy[0], greedy[1])
    assert not np.array_equal(sampled[0], sampled[1])
    assert sampled[0][0] == simulated_token(ids(1, 2), 2, VOCAB, seed=1)


def test_a_replayed_request_continues_as_before() -> None:
    whole = simulated_output(spec_of(ids(1, 2, 3)), VOCAB)
    replayed = spec_of(np.concatenate((ids(1, 2, 3), whole[:5])), num_replayed=5)

    assert np.array_equal(simulated_output(replayed, VOCAB), whole)


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    stop_ids=st.sets(st.integers(0, 9), max_size=8),
)
def test_stop_ids_are_generated_only_if_scripted(prompt: list[int], stop_ids: set[int]) -> None:
    spec = spec_of(ids(*prompt), max_tokens=40, stop_ids=tuple(sorted(stop_ids)))

    output = simulated_output(spec, 10)

    assert len(output) == 40
    assert not stop_ids & set(output.tolist())
    assert ((output >= 0) & (output < 10)).all()


@pytest.mark.parametrize(
    ("length", "min_tokens", "max_tokens", "expected"),
    [(3, 0, 8, 3), (1, 0, 8, 1), (3, 5, 8, 6), (3, 2, 8, 3), (9, 0, 8, 8), (8, 0, 8, 8)],
)
def test_a_scripted_stop_ends_the_output(
    length: int, min_tokens: int, max_tokens: int, expected: int
) -> None:
    config = SimulatedConfig(min_output_tokens=length, max_output_tokens=length)
    spec = spec_of(ids(4, 5), max_tokens=max_tokens, min_tokens=min_tokens, stop_ids=(7, 8))

    output = simulated_output(spec, VOCAB, config)

    is_stopped = max(length, min_tokens + 1) <= max_tokens
    assert len(output) == expected
    assert (output[-1] == 7) == is_stopped
    assert not {7, 8} & set(output[:-1].tolist())


def test_hashed_lengths_fill_their_range() -> None:
    config = SimulatedConfig(min_output_tokens=2, max_output_tokens=5)

    lengths = {
        len(simulated_output(spec_of(ids(i), max_tokens=9, stop_ids=(0,)), VOCAB, config))
        for i in range(60)
    }

    assert lengths == {2, 3, 4, 5}


def test_without_stop_ids_a_request_runs_to_its_length() -> None:
    config = SimulatedConfig(min_output_tokens=1, max_output_tokens=1)

    assert len(simulated_output(spec_of(ids(1), max_tokens=6), VOCAB, config)) == 6


def test_tokens_are_chosen_from_the_given_ids() -> None:
    spec = spec_of(ids(1, 2), max_tokens=40, stop_ids=(30,))

    assert set(simulated_output(spec, ids(5, 30, 700)).tolist()) == {5, 700}


def test_the_text_of_a_known_tokenizer_is_readable(tmp_path: Path) -> None:
    folder = resolve_model("demo")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chosen = generated_ids(folder, tokenizer.get_vocab_size())

    assert len(chosen) > 1000
    text = tokenizer.decode(chosen.tolist())
    assert text.isascii()
    assert text.isprintable()
    assert generated_ids(folder, 100).max() < 100, "of a smaller vocabulary"
    (tmp_path / "tokenizer.json").write_text("{}")
    for without in (None, tmp_path, tmp_path / "none"):
        assert np.array_equal(generated_ids(without, 9), np.arange(9))


def test_a_vocabulary_of_only_stop_ids_still_generates_tokens() -> None:
    banned = np.array([[0], [1]], dtype=np.int32)

    tokens = tokens_at(np.array([5], dtype=np.uint64), np.array([3]), ids(0, 1), banned)

    assert tokens[0] in (0, 1)


def test_logprobs_are_a_distribution_with_the_token_on_top() -> None:
    logprobs = simulated_logprobs(ids(998, 3), 4, VOCAB)

    assert logprobs.top_ids.tolist() == [[998, 999, 0, 1], [3, 4, 5, 6]]
    assert np.exp(logprobs.top_logprobs).sum(axis=1) == pytest.approx([0.9375, 0.9375])
    assert np.array_equal(logprobs.chosen, logprobs.top_logprobs[:, 0])
    assert logprobs.ranks.tolist() == [1, 1]
