"""An open loop of requests on a service, and what its clients saw.

Owns the workload (arrivals that do not wait for answers, prompts of which some begin alike) and the
times as a client has them. Does not know what is made of it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from penstock.client import Client, Finished, TokenPrompt, Tokens

_NUM_PREFIXES = 4
_PREFIX_TOKENS = 64
_SHARED = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: when it is sent, seconds after the start, what, and how much it generates."""

    at_s: float
    ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(slots=True)
class Seen:
    """One answer. Seconds: of the client, from sending; `queue_s`, `served_ttft_s` the server's."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    served_ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


def poisson(rate_per_s: float, duration_s: float, *, vocab_size: int, seed: int) -> list[Ask]:
    """Poisson arrivals; prompts of 32 to 500 tokens, outputs of 8 to 200, both lognormal."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(3, vocab_size, (_NUM_PREFIXES, _PREFIX_TOKENS))
    asks: list[Ask] = []
    at_s = random.exponential(1.0 / rate_per_s)
    while at_s < duration_s:
        num_prompt = int(np.clip(random.lognormal(4.8, 0.7), 32, 500))
        ids = random.integers(3, vocab_size, num_prompt)
        if random.random() < _SHARED and num_prompt > _PREFIX_TOKENS:
            ids[:_PREFIX_TOKENS] = prefixes[random.integers(_NUM_PREFIXES)]
        num_output = int(np.clip(random.lognormal(3.7, 0.6), 8, 200))
        asks.append(Ask(at_s=at_s, ids=tuple(ids.tolist()), num_output_tokens=num_output))
        at_s += random.exponential(1.0 / rate_per_s)
    return asks


async def drive(client: Client, asks: list[Ask], limit_s: float) -> list[Seen]:
    """Send each at its time, whatever has been answered by then; what was seen, in order."""
    start_s = time.perf_counter() + 0.1
    async with asyncio.timeout(limit_s):
        return list(await asyncio.gather(*(_one(client, ask, start_s) for ask in asks)))


async def _one(client: Client, ask: Ask, start_s: float) -> Seen:
    await asyncio.sleep(start_s + ask.at_s - time.perf_counter())
    sent_s = time.perf_counter()
    last_s: float | None = None
    seen = Seen()
    async for event in client.generate(
        TokenPrompt(ids=ask.ids),
        max_tokens=ask.num_output_tokens,
        ignore_eos=True,
        temperature=0.0,
    ):
        now_s = time.perf_counter()
        if isinstance(event, Tokens):
            if last_s is None:
                seen.ttft_s = now_s - sent_s
            else:
                seen.gaps_s.append(now_s - last_s)
            # Tokens that come in one message: the first was waited for, the others were not.
            seen.gaps_s += [0.0] * (event.num_tokens - 1)
            last_s = now_s
        elif isinstance(event, Finished):
            seen.e2e_s = now_s - sent_s
            seen.queue_s = event.timings.queue_s
            seen.served_ttft_s = event.timings.ttft_s or 0.0
    return seen
