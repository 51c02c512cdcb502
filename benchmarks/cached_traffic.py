"""Generates synthetic traffic for the prefix cache: requests whose prompts share prefixes.

There are three kinds of traffic: conversations; a few popular system prompts before unique text;
and documents about which a few questions are asked in close succession. They differ in when the
blocks of a prompt are used again. The same seed gives the same requests.
"""

import heapq
from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.server.observe.recording.trace import TraceRequest

_BLOCK_TOKENS = 128
_OUTPUT_TOKENS = 64
_SIGMA = 0.8


class _Prompts:
    """Draws lengths, and creates text as ids of blocks that have not been used before."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._next_id = 0

    def text(self, mean_tokens: float) -> list[int]:
        """Return the ids of new blocks. The length is lognormal with a mean of `mean_tokens`
        tokens.
        """
        first = self._next_id
        self._next_id += self.length(mean_tokens / _BLOCK_TOKENS)
        return list(range(first, self._next_id))

    def length(self, mean: float) -> int:
        """Draw a lognormal number with this mean, rounded, at least 1."""
        return max(1, round(mean * float(self.random.lognormal(-(_SIGMA**2) / 2, _SIGMA))))


def _conversations(prompts: _Prompts) -> Iterator[list[int]]:
    """Yield the prompts (block ids) of turns of 200 concurrent conversations in random order. A
    conversation continues after a turn with a probability of 80 %.
    """
    random = prompts.random
    systems = [prompts.text(1000) for _ in range(8)]
    active: list[list[int]] = []
    while True:
        if len(active) < 200:
            active.append(systems[random.integers(len(systems))] + prompts.text(1500))
        index = int(random.integers(len(active)))
        yield active[index]
        if random.random() < 0.8:
            active[index] = active[index] + prompts.text(600)
        else:
            active.pop(index)


def _system_prompts(prompts: _Prompts) -> Iterator[list[int]]:
    """Yield prompts (block ids): one of 400 system prompts, by Zipf's law, and unique text."""
    heads = [prompts.text(3000) for _ in range(400)]
    weights = 1.0 / np.arange(1, len(heads) + 1)
    while True:
        index = int(prompts.random.choice(len(heads), p=weights / weights.sum()))
        yield heads[index] + prompts.text(2000)


def _documents(prompts: _Prompts) -> Iterator[list[int]]:
    """Yield prompts (block ids): a document and a question. A document gets five questions on
    average; the mean gap between them is 60 requests.
    """
    due: list[tuple[float, int, list[int]]] = []
    now = 0
    while True:
        now += 1
        if not due or due[0][0] > now or prompts.random.random() < 0.2:
            document = prompts.text(12_000)
            gaps = prompts.random.exponential(60.0, prompts.length(5.0) - 1)
            for place, at in enumerate((now, *(now + gaps.cumsum()))):
                heapq.heappush(due, (float(at), document[0] + place, document))
        yield heapq.heappop(due)[2] + prompts.text(_BLOCK_TOKENS)


KINDS = {
    "conversations": _conversations,
    "system prompts": _system_prompts,
    "documents": _documents,
}


def cached_traffic(kind: str, num_requests: int, rate_per_s: float) -> list[TraceRequest]:
    """Return requests of one of `KINDS`, with Poisson arrivals."""
    prompts = _Prompts(seed=1)
    chains = list(islice(KINDS[kind](prompts), num_requests))
    arrivals_s = prompts.random.exponential(1.0 / rate_per_s, num_requests).cumsum().tolist()
    return [
        TraceRequest(
            arrival_s=arrival_s,
            num_prompt_tokens=len(chain) * _BLOCK_TOKENS,
            num_output_tokens=_OUTPUT_TOKENS,
            prefix_ids=tuple(chain),
            prefix_block_tokens=_BLOCK_TOKENS,
        )
        for arrival_s, chain in zip(arrivals_s, chains, strict=True)
    ]
