"""The sampler against a slow reference in plain numpy, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.executor.torch import inverse_cdf
from penstock.executor.torch.counter_random import uniforms
from penstock.executor.torch.cut_search import search_threshold
from penstock.executor.torch.inverse_cdf import draw, draw_truncated
from penstock.executor.torch.sampler import Sampled, sample
from penstock.executor.torch.slot_rules import SlotRules
from penstock.executor.torch.truncation import Truncation
from penstock.scheduler.batch import Batch
from penstock.scheduler.request import Request, SamplingParams
from penstock.scheduler.slot_arrays import SlotArrays
from support.core import make_spec

VOCAB = 3000
GREEDY = SamplingParams(temperature=0.0)


def splitmix_uniform(seed: int, position: int) -> float:
    """The documented hash in Python integers."""
    whole = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & whole
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & whole
        return value ^ (value >> 31)

    counter = (position + 1) * 0x9E3779B97F4A7C15
    return (mix((mix(seed) + counter) & whole) >> 11) / 2**53


class Case:
    """A request in a slot, with output so far, and the logits that come for it."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        prompt: Sequence[int] = (5, 6, 7, 7),
        output: Sequence[int] = (),
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        logits: NDArray[np.float32] | None = None,
        seed: int = 0,
    ) -> None:
        self.sampling = sampling
        self.prompt, self.output = list(prompt), list(output)
        self.min_tokens, self.stop_ids = min_tokens, stop_ids
        if logits is None:
            logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
        self.logits = logits

    def edited(self) -> NDArray[np.float64]:
        """Logits after penalties, bias and barred stops, one token at a time."""
        logits = self.logits.astype(np.float64)
        sampling = self.sampling
        for token in set(self.prompt + self.output):
            penalty = sampling.repetition_penalty
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        for token in set(self.output):
            logits[token] -= sampling.presence_penalty
            logits[token] -= sampling.frequency_penalty * self.output.count(token)
        for token, value in sampling.logit_bias:
            logits[token] += value
        if len(self.output) < self.min_tokens:
            for token in self.stop_ids:
                logits[token] = -np.inf
        return logits

    def kept(self) -> NDArray[np.bool_]:
        """Tokens that truncation leaves."""
        sampling = self.sampling
        logits = self.edited() / sampling.temperature
        probabilities = np.exp(logits - logits.max())
        is_kept = np.ones(len(logits), dtype=bool)
        descending = np.sort(logits)[::-1]
        if 0 < sampling.top_k < len(logits):
            is_kept &= logits >= descending[sampling.top_k - 1]
        if sampling.top_p < 1.0:
            order = np.argsort(-np.where(is_kept, logits, -np.inf))
            masses = np.cumsum(np.where(is_kept, probabilities, 0.0)[order])
            enough = np.searchsorted(masses, sampling.top_p * masses[-1])
            is_kept &= logits >= logits[order[enough]]
        if sampling.min_p > 0.0:
            is_kept &= probabilities >= sampling.min_p
        return is_kept

    def expected(self) -> int:
        """The token."""
        if self.sampling.temperature == 0.0:
            return int(self.edited().argmax())
        logits = self.edited() / self.sampling.temperature
        weights = np.where(self.kept(), np.exp(logits - logits.max()), 0.0)
        cumulated = np.cumsum(weights)
        position = len(self.prompt) + len(self.output)
        target = splitmix_uniform(self.sampling.seed, position) * cumulated[-1]
        return int(np.flatnonzero(cumulated > target)[0])


def run(cases: Sequence[Case], dtype: torch.dtype = torch.float32) -> Sampled:
    """All cases in one batch; slots in another order than rows."""
    arrays = SlotArrays(num_slots=len(cases) + 3, max_seq_len=256, block_size=16)
    rules = SlotRules(vocab_size=VOCAB, num_embeddings=VOCAB)
    slots = np.random.default_rng(3).permutation(len(cases) + 3)[: len(cases)]
    requests = []
    for slot, case in zip(slots.tolist(), cases, strict=True):
        spec = make_spec(
            slot + 1,
            case.prompt,
            max_tokens=100,
            hashed=False,
            sampling=case.sampling,
            min_tokens=case.min_tokens,
            stop_ids=case.stop_ids,
        )
        tokens = np.array(case.prompt + case.output, dtype=np.int32)
        request = Request(spec=spec, sequence=slot, tokens=tokens, block_hashes=[], slot=slot)
        arrays.fill(request)
        requests.append(request)
    none = np.zeros(0, dtype=np.int32)
    rules.follow(
        Batch(
            step=1,
            arrays=arrays,
            slots=none,
            num_tokens=none,
            starts=none,
            num_decodes=0,
            sampled_slots=none,
            admitted=tuple(requests),
        )
    )
    logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(dtype)
    positions = np.array([len(case.prompt) + len(case.output) for case in cases], dtype=np.int64)
    return sample(logits, arrays, slots.astype(np.int64), positions, rules)


EDITS = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "negative penalties": SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias=((3, 9.0), (4, -100.0), (2999, 8.5))),
    "all": SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((5, 3.0), (6, -2.0)),
    ),
}
CUTS = {
    "none": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "icy": SamplingParams(temperature=1e-30),
    "hot": SamplingParams(temperature=3.0),
    "top_k 1": SamplingParams(top_k=1),
    "top_k 5": SamplingParams(top_k=5),
    "top_k 500": SamplingParams(top_k=500),
    "top_k 2000": SamplingParams(top_k=2000, temperature=2.0),
    "top_k all": SamplingParams(top_k=VOCAB),
    "top_p 0.1": SamplingParams(top_p=0.1),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_p 0.999 hot": SamplingParams(top_p=0.999, temperature=3.0),
    "top_p tiny": SamplingParams(top_p=1e-6),
    "min_p 0.2": SamplingParams(min_p=0.2),
    "min_p 0.001": SamplingParams(min_p=0.001),
    "min_p 1": SamplingParams(min_p=1.0),
    "all cuts": SamplingParams(temperature=1.3, top_k=300, top_p=0.8, min_p=0.01),
}


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


def test_a_batch_of_everything_gives_each_row_what_it_gets_alone() -> None:
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
def test_ties_at_the_threshold_all_stay(top_k: int) -> None:
    # bfloat16 logits tie all the time; which of them stay must not depend on a sort's whims.
    levels = np.repeat(np.arange(6, 0, -1), VOCAB // 6).astype(np.float32)
    logits = np.random.default_rng(0).permutation(levels)
    cases = [
        Case(SamplingParams(top_k=top_k, seed=seed, top_p=top_p), logits=logits)
        for seed in range(10)
        for top_p in (1.0, 0.7)
    ]

    assert run(cases).tokens.tolist() == [case.expected() for case in cases]


def test_stop_ids_are_barred_until_min_tokens() -> None:
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


def test_nobody_asked_for_logprobs() -> None:
    assert run([Case(GREEDY), Case(SamplingParams())]).logprobs is None


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_poisoned_row_is_told_apart(poison: float, sampling: SamplingParams) -> None:
    bad = np.random.default_rng(0).normal(0, 3, VOCAB).astype(np.float32)
    bad[77] = poison
    good = [Case(replace(sampling, seed=1), seed=1), Case(replace(sampling, seed=2), seed=2)]

    sampled = run([good[0], Case(sampling, logits=bad), good[1]])

    assert sampled.is_good.tolist() == [True, False, True]
    assert sampled.tokens[[0, 2]].tolist() == [case.expected() for case in good]


def test_all_tokens_barred_is_told_apart() -> None:
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


def test_extreme_uniforms_stay_among_what_has_weight() -> None:
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
