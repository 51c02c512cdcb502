"""The GPU sampler compared with the slow numpy reference. Without a GPU, it runs in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="Triton is not installed")

from penstock.executor.torch.cuda.device_sampler import (
    DeviceSampler,
    TokenMasks,
    Variant,
    read_samples,
)
from penstock.executor.torch.sampler import Sampled, sample
from penstock.scheduler.request import SamplingParams
from unit.executor.sampling_cases import CUTS, EDITS, GREEDY, VOCAB, AdmittedCases, Case
from unit.executor.triton_device import DEVICE, IS_INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
NUM_CASES = 3 if IS_INTERPRETED else 40
WIDE = 34_000
"""Large enough that the maxima of the parts bound the candidates."""


class DeviceCases:
    """A `DeviceSampler` that has received the sampling options of admitted cases."""

    def __init__(self, seated: AdmittedCases, vocab_size: int = VOCAB) -> None:
        self.seated = seated
        self.sampler = DeviceSampler(
            max_num_seqs=seated.num_slots, vocab_size=vocab_size, device=DEVICE
        )
        self.last_tokens = torch.zeros(2 * seated.num_slots + 2, dtype=torch.int32, device=DEVICE)
        self.sampler.update(seated.batch, seated.rules)

    def sample(
        self,
        logits: torch.Tensor,
        positions: NDArray[np.int64] | None = None,
        masks: TokenMasks | None = None,
        variant: Variant | None = None,
    ) -> Sampled:
        slots = self.seated.slots
        at = self.seated.positions if positions is None else positions
        plan = self.sampler.plan(slots, at)
        samples = self.sampler.sample(
            logits.to(DEVICE),
            torch.from_numpy(slots).to(DEVICE),
            torch.from_numpy(at).to(DEVICE),
            self.last_tokens,
            variant=variant or plan.variant,
            masks=masks,
        )
        rows, tops = samples.rows.cpu().numpy(), samples.tops.cpu().numpy()
        tokens, is_good, logprobs = read_samples(rows, tops, plan)
        kept = self.last_tokens.cpu().numpy()[2 * slots + at % 2]
        np.testing.assert_array_equal(kept, tokens)
        return Sampled(tokens=tokens, is_good=is_good, logprobs=logprobs)


def run(cases: Sequence[Case]) -> Sampled:
    seated = AdmittedCases(cases)
    return DeviceCases(seated).sample(torch.from_numpy(seated.logits))


def test_a_batch_of_everything_gives_the_reference_s_tokens() -> None:
    kinds = [GREEDY, *CUTS.values(), *EDITS.values(), replace(GREEDY, num_logprobs=4)]
    cases = [
        Case(replace(kind, seed=index + 100 * turn), output=[4, 4], seed=index + turn)
        for turn in range(NUM_CASES // 3)
        for index, kind in enumerate(kinds)
    ]

    assert run(cases).tokens.tolist() == [case.expected() for case in cases]


def test_a_batch_with_only_temperatures_uses_the_plain_variant() -> None:
    cases = [Case(replace(CUTS[n], seed=9), seed=2) for n in ("none", "cold", "icy", "hot")]
    cases.append(Case(GREEDY))
    seated = AdmittedCases(cases)
    device = DeviceCases(seated)

    sampled = device.sample(torch.from_numpy(seated.logits))

    plan = device.sampler.plan(seated.slots, seated.positions)
    assert plan.variant is Variant.PLAIN
    assert sampled.tokens.tolist() == [case.expected() for case in cases]
    again = device.sample(torch.from_numpy(seated.logits), variant=Variant.FULL)
    assert again.tokens.tolist() == sampled.tokens.tolist()


def test_edits_leave_exactly_the_reference_logits() -> None:
    cases = [
        Case(replace(kind, temperature=0.0, num_logprobs=50), output=[8, 8, 9, 5, 8], seed=seed)
        for seed, kind in enumerate(EDITS.values())
    ]

    logprobs = run(cases).logprobs

    assert logprobs is not None
    for row, case in enumerate(cases):
        edited = case.edited()
        expected = edited - edited.max() - np.log(np.exp(edited - edited.max()).sum())
        order = np.argsort(-expected)[:50]
        np.testing.assert_array_equal(logprobs.top_ids[row], order)
        np.testing.assert_allclose(logprobs.top_logprobs[row], expected[order], atol=2e-5)


@pytest.mark.parametrize("top_k", [1, 64, 1500])
def test_all_ties_at_the_threshold_are_kept(top_k: int) -> None:
    levels = np.repeat(np.arange(6, 0, -1), VOCAB // 6).astype(np.float32)
    logits = np.random.default_rng(0).permutation(levels)
    cases = [
        Case(SamplingParams(top_k=top_k, seed=seed, top_p=top_p), logits=logits)
        for seed in range(NUM_CASES)
        for top_p in (1.0, 0.7)
    ]

    assert run(cases).tokens.tolist() == [case.expected() for case in cases]


def wide_logits(num_rows: int) -> torch.Tensor:
    """Return bfloat16 logits [num_rows, WIDE]. Four kinds of rows alternate: flat, usual, peaked
    and constant.
    """
    random = np.random.default_rng(5)
    scales = np.resize([0.5, 2.0, 6.0, 0.0], num_rows)[:, None]
    rows = random.normal(0, 1, (num_rows, WIDE)) * scales
    return torch.from_numpy(rows.astype(np.float32)).bfloat16()


def test_a_wide_vocabulary_gives_the_host_sampler_s_tokens() -> None:
    names = ["top_k 5", "top_p 0.9"]
    if not IS_INTERPRETED:
        names += ["min_p 0.2", "all cuts", "top_k 2000"]
    cases = [
        Case(replace(CUTS[name], seed=seed, num_logprobs=3))
        for seed in range(1 if IS_INTERPRETED else 20)
        for name in names
    ]
    seated = AdmittedCases(cases)
    logits = wide_logits(len(cases))

    sampled = DeviceCases(seated, WIDE).sample(logits)

    expected = sample(logits, seated.arrays, seated.slots, seated.positions, seated.rules)
    assert sampled.tokens.tolist() == expected.tokens.tolist()
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    np.testing.assert_allclose(sampled.logprobs.chosen, expected.logprobs.chosen, atol=1e-4)
    np.testing.assert_array_equal(sampled.logprobs.ranks, expected.logprobs.ranks)
    np.testing.assert_allclose(
        sampled.logprobs.top_logprobs, expected.logprobs.top_logprobs, atol=1e-4
    )


def test_stop_ids_are_banned_until_min_tokens() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[10, 11, 12]] = [30, 20, 10]
    cases = [
        Case(GREEDY, output=[1] * length, min_tokens=3, stop_ids=(10, 11, VOCAB + 5), logits=logits)
        for length in range(5)
    ]

    assert run(cases).tokens.tolist() == [12, 12, 12, 10, 10]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_poisoned_row_is_identified(poison: float, sampling: SamplingParams) -> None:
    bad = np.random.default_rng(0).normal(0, 3, VOCAB).astype(np.float32)
    bad[77] = poison
    nothing = np.full(VOCAB, -np.inf, dtype=np.float32)
    good = [Case(replace(sampling, seed=1), seed=1), Case(replace(sampling, seed=2), seed=2)]

    sampled = run([good[0], Case(sampling, logits=bad), good[1], Case(sampling, logits=nothing)])

    assert sampled.is_good.tolist() == [True, False, True, False]
    assert sampled.tokens[[0, 2]].tolist() == [case.expected() for case in good]
    assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all()


def test_penalties_count_each_drawn_token_once_however_often_a_step_is_run() -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.1)
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[20, 21]] = [3.0, 1.5]
    output: list[int] = []
    device = DeviceCases(AdmittedCases([Case(sampling, logits=logits)]))
    rows = torch.from_numpy(logits[None])

    for position in range(4, 12):
        expected = Case(sampling, output=output, logits=logits).expected()
        at = np.array([position], dtype=np.int64)
        for _ in range(2):
            assert device.sample(rows, at).tokens.tolist() == [expected]
        output.append(expected)

    assert set(output) > {20, 21}


def test_masked_rows_take_none_but_allowed_tokens() -> None:
    allowed = np.array([2047, 2048, 2999])
    bits = np.zeros((1, -(-VOCAB // 32)), dtype=np.uint32)
    np.bitwise_or.at(bits[0], allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
    sampling = SamplingParams(temperature=50.0)
    cases = [Case(replace(sampling, seed=seed), seed=seed) for seed in range(NUM_CASES)]
    cases += [Case(replace(sampling, top_k=50)), Case(GREEDY), Case(GREEDY, seed=8)]
    rows = torch.zeros(len(cases), dtype=torch.int64)
    rows[-1] = -1
    masks = TokenMasks(bits=torch.from_numpy(bits.view(np.int32)).to(DEVICE), rows=rows.to(DEVICE))
    seated = AdmittedCases(cases)

    sampled = DeviceCases(seated).sample(
        torch.from_numpy(seated.logits), masks=masks, variant=Variant.FULL
    )

    assert np.isin(sampled.tokens[:-1], allowed).all()
    assert sampled.tokens[-1] == cases[-1].expected()


def test_a_request_beyond_the_tables_is_rejected() -> None:
    seated = AdmittedCases([Case(replace(GREEDY, num_logprobs=129)), Case(GREEDY)])
    sampler = DeviceCases(seated).sampler

    assert [bool(sampler.rejection(request)) for request in seated.batch.admitted] == [True, False]
