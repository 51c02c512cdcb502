"""The sampler compared with a slow reference in plain numpy, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.executor.torch import inverse_cdf
from penstock.executor.torch.counter_random import uniforms
from penstock.executor.torch.inverse_cdf import draw, draw_truncated
from penstock.executor.torch.sampler import Sampled, sample
from penstock.executor.torch.threshold_search import search_threshold
from penstock.executor.torch.truncation import Truncation
from penstock.scheduler.request import SamplingParams
from unit.executor.sampling_cases import (
    CUTS,
    EDITS,
    GREEDY,
    VOCAB,
    AdmittedCases,
    Case,
    splitmix_uniform,
)


def run(cases: Sequence[Case], dtype: torch.dtype = torch.float32) -> Sampled:
    seated = AdmittedCases(cases)
    logits = torch.from_numpy(seated.logits).to(dtype)
    return sample(logits, seated.arrays, seated.slots, seated.positions, seated.rules)


@pytest.mark.parametrize("name", EDITS)
def test_edits_change_the_greedy_token_as_the_reference_does(name: str) -> None:
    cases = [
        Case(
            replace(EDITS[name], temperature=0.0),
            prompt=[5, 6, 7, 7, 2998],
            output=[8, 8, 9, 5, int(top)],
            logits=logits,
        )
        for top, logits in ((x.argmax(), x) for x in _random_logits(20))
    ]

    assert run(cases).tokens.tolist() == [case.expected() for case in cases]


def test_edits_leave_exactly_the_reference_logits() -> None:
    # The log probabilities of the most likely tokens show the edited values themselves.
    cases = [
        Case(
            replace(sampling, temperature=0.0, num_logprobs=50),
            output=[8, 8, 9, 5, 8],
            seed=seed,
        )
        for seed, sampling in enumerate(EDITS.values())
    ]

    logprobs = run(cases).logprobs

    assert logprobs is not None
    for row, case in enumerate(cases):
        edited = case.edited()
        expected = edited - edited.max() - np.log(np.exp(edited - edited.max()).sum())
        order = np.argsort(-expected)[:50]
        np.testing.assert_array_equal(logprobs.top_ids[row], order)
        np.testing.assert_allclose(logprobs.top_logprobs[row], expected[order], atol=2e-5)


@pytest.mark.parametrize("name", CUTS)
def test_draws_are_the_reference_s(name: str) -> None:
    cases = [
        Case(replace(CUTS[name], seed=seed), output=[9] * (seed % 5), seed=seed)
        for seed in range(40)
    ]

    assert run(cases).tokens.tolist() == [case.expected() for case in cases]


def test_a_batch_with_all_options_gives_each_row_its_separate_result() -> None:
    kinds = [GREEDY, *CUTS.values(), *EDITS.values(), replace(GREEDY, num_logprobs=4)]
    cases = [
        Case(replace(kind, seed=index + 100 * turn), output=[4, 4], seed=index)
        for turn in range(3)
        for index, kind in enumerate(kinds)
    ]

    together = run(cases).tokens.tolist()

    assert together == [int(run([case]).tokens[0]) for case in cases]
    assert together == [case.expected() for case in cases]


@pytest.mark.parametrize("top_k", [1, 3, 64, 65, 1024, 1500])
def test_all_ties_at_the_threshold_are_kept(top_k: int) -> None:
    # bfloat16 logits tie all the time; which of them stay must not depend on a sort's whims.
    levels = np.repeat(np.arange(6, 0, -1), VOCAB // 6).astype(np.float32)
    logits = np.random.default_rng(0).permutation(levels)
    cases = [
        Case(SamplingParams(top_k=top_k, seed=seed, top_p=top_p), logits=logits)
        for seed in range(10)
        for top_p in (1.0, 0.7)
    ]

    assert run(cases).tokens.tolist() == [case.expected() for case in cases]


def test_stop_ids_are_banned_until_min_tokens() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[10, 11, 12]] = [30, 20, 10]
    cases = [
        Case(GREEDY, output=[1] * length, min_tokens=3, stop_ids=(10, 11, VOCAB + 5), logits=logits)
        for length in range(5)
    ]

    assert run(cases).tokens.tolist() == [12, 12, 12, 10, 10]


def test_logprobs_and_ranks_are_of_the_whole_distribution() -> None:
    cases = [
        Case(SamplingParams(temperature=2.0, top_k=50, seed=seed, num_logprobs=seed % 3), seed=seed)
        for seed in range(9)
    ] + [Case(GREEDY)]

    sampled = run(cases)

    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids.shape == (10, 2)
    for row, case in enumerate(cases[:9]):
        logits = case.edited()
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        token = sampled.tokens[row]
        assert sampled.logprobs.chosen[row] == pytest.approx(logprobs[token], abs=1e-5)
        assert sampled.logprobs.ranks[row] == (logprobs > logprobs[token]).sum() + 1


def test_logprobs_are_absent_unless_requested() -> None:
    assert run([Case(GREEDY), Case(SamplingParams())]).logprobs is None


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_poisoned_row_is_identified(poison: float, sampling: SamplingParams) -> None:
    bad = np.random.default_rng(0).normal(0, 3, VOCAB).astype(np.float32)
    bad[77] = poison
    good = [Case(replace(sampling, seed=1), seed=1), Case(replace(sampling, seed=2), seed=2)]

    sampled = run([good[0], Case(sampling, logits=bad), good[1]])

    assert sampled.is_good.tolist() == [True, False, True]
    assert sampled.tokens[[0, 2]].tolist() == [case.expected() for case in good]


def test_all_tokens_banned_is_distinguished() -> None:
    nothing = np.full(VOCAB, -np.inf, dtype=np.float32)

    assert run([Case(GREEDY), Case(GREEDY, logits=nothing)]).is_good.tolist() == [True, False]


def test_uniforms_are_the_documented_hash() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345], dtype=np.uint64)
    positions = np.array([0, 1, 2**31 - 1, 7, 100_000], dtype=np.int64)

    expected = [
        splitmix_uniform(int(seed), int(position))
        for seed, position in zip(seeds, positions, strict=True)
    ]

    assert uniforms(seeds, positions).tolist() == expected


def test_uniforms_fill_their_interval_evenly() -> None:
    # Chi-square with 99 degrees of freedom, over positions of one seed and over seeds.
    many = np.arange(20_000)
    for numbers in (
        uniforms(np.full(20_000, 5, dtype=np.uint64), many),
        uniforms(many.astype(np.uint64), np.full(20_000, 3)),
    ):
        counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
        assert ((counts - 200) ** 2 / 200).sum() < 150  # p = 0.0007
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    count = 20_000
    scores = torch.from_numpy(np.log(probabilities / 0.5)).float().expand(count, -1)
    numbers = torch.from_numpy(uniforms(np.full(count, 9, dtype=np.uint64), np.arange(count)))

    counts = np.bincount(draw(scores, numbers).numpy(), minlength=5)

    expected = probabilities * count
    assert ((counts - expected) ** 2 / expected).sum() < 20  # 4 degrees of freedom, p = 0.0005


def test_extreme_uniforms_select_tokens_with_weight() -> None:
    scores = torch.tensor([[float("-inf"), 0.0, -1.0, float("-inf")]] * 2)
    numbers = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)

    assert draw(scores, numbers).tolist() == [1, 2]


def test_candidates_and_search_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    # Peaked enough for candidates; rounded, so that values tie.
    logits = random.normal(0, 5, (300, 4000)).round(1).astype(np.float32)
    scores = torch.from_numpy(logits)
    scores = scores - scores.max(1, keepdim=True).values
    truncation = Truncation(
        top_k=torch.from_numpy(random.choice([0, 1, 20, 63], 300)),
        top_p=torch.from_numpy(random.choice([1.0, 0.9, 0.3], 300)),
        min_p=torch.from_numpy(random.choice([0.0, 0.01, 0.3], 300)),
    )
    numbers = torch.from_numpy(uniforms(np.arange(300, dtype=np.uint64), np.zeros(300, dtype=int)))

    among_candidates = draw_truncated(scores, numbers, truncation)
    monkeypatch.setattr(inverse_cdf, "_WIDTHS", ())
    by_search = draw_truncated(scores, numbers, truncation)

    assert torch.equal(among_candidates, by_search)


def test_search_finds_a_value_of_the_row() -> None:
    scores = torch.from_numpy(np.random.default_rng(6).normal(0, 1, (50, 999)).astype(np.float32))
    scores = scores - scores.max(1, keepdim=True).values
    truncation = Truncation(
        top_k=torch.arange(1, 51) * 15,
        top_p=torch.ones(50, dtype=torch.float64),
        min_p=torch.zeros(50, dtype=torch.float64),
    )

    found = search_threshold(scores, truncation)

    expected = scores.sort(dim=1, descending=True).values.gather(1, truncation.top_k[:, None] - 1)
    assert torch.equal(found, expected[:, 0])


def _random_logits(count: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(17)
    return [random.normal(0, 3, VOCAB).astype(np.float32) for _ in range(count)]
