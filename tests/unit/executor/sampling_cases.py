"""Requests and logits for tests of samplers, and a slow reference in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.request import Request, SamplingParams
from penstock.scheduler.slot_arrays import SlotArrays
from support.batches import batch_of
from support.core import make_spec

VOCAB = 3000
GREEDY = SamplingParams(temperature=0.0)


def splitmix_uniform(seed: int, position: int) -> float:
    """Return the documented random number in [0, 1) for `seed` and `position`, computed with Python
    integers (SplitMix64).
    """
    whole = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & whole
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & whole
        return value ^ (value >> 31)

    counter = (position + 1) * 0x9E3779B97F4A7C15
    return (mix((mix(seed) + counter) & whole) >> 11) / 2**53


class Case:
    """A request with its output so far, and the logits of its next token."""

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
        """Return the logits after penalties and bias. Stop tokens are -inf until the output has
        `min_tokens` tokens.
        """
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
        if self.sampling.temperature == 0.0:
            return int(self.edited().argmax())
        logits = self.edited() / self.sampling.temperature
        weights = np.where(self.kept(), np.exp(logits - logits.max()), 0.0)
        cumulated = np.cumsum(weights)
        position = len(self.prompt) + len(self.output)
        target = splitmix_uniform(self.sampling.seed, position) * cumulated[-1]
        return int(np.flatnonzero(cumulated > target)[0])


class AdmittedCases:
    """Cases admitted as requests of one batch, in random slots.

    The batch admits all of them but computes no rows. `rules` contains their sampling options.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self.num_slots = len(cases) + 3
        self.arrays = SlotArrays(num_slots=self.num_slots, max_seq_len=256, block_size=16)
        self.rules = SlotRules(vocab_size=VOCAB, num_embeddings=VOCAB)
        self.slots = np.random.default_rng(3).permutation(self.num_slots)[: len(cases)]
        self.positions = np.array([len(c.prompt) + len(c.output) for c in cases], dtype=np.int64)
        requests = []
        for slot, case in zip(self.slots.tolist(), cases, strict=True):
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
            self.arrays.fill(request)
            requests.append(request)
        self.batch = batch_of(self.arrays, (), admitted=tuple(requests))
        self.rules.update(self.batch)
        self.logits = np.stack([case.logits for case in cases])


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
