"""Measures `penstock serve` with a model under many streams, read by clients on the same machine.

Run as a program, this module is one of the client processes:

    served_model.py ADDRESS STREAMS PROMPT_TOKENS OUTPUT_TOKENS VOCABULARY SEED START_AT

START_AT: Unix time, seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from load import LoadRequest, open_loop, sending
from penstock.client import Client
from services import Service
from services import service as start_service
from usage import print_usage

TEMPERATURE = 1.0
_NUM_CLIENTS = 8
_LEAD_S = 3.0
_LIMIT_S = 120.0
_NUM_SINGLES = 6
_SIMULATED_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Number of tokens of each stream's prompt and output; `vocab_size`: upper bound (exclusive) of
    the prompt's token ids.
    """

    num_prompt: int
    num_new: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """The results of a wave: streams that all start together."""

    tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


async def served(
    service: Service, load: Load, num_streams: int, *, num_waves: int
) -> tuple[list[Wave], list[float]]:
    """Send some requests one by one, then run waves; return the waves, and the TTFT of the single
    requests, ms.

    Calls another service first, because the first call of a client process is slow.
    """
    with start_service("--executor", "simulated") as other:
        await _single_ttfts_ms(other.address, replace(load, vocab_size=_SIMULATED_VOCAB_SIZE))
    singles = await _single_ttfts_ms(service.address, load)
    waves = [
        await run_wave(service.address, load, num_streams, 100 + turn) for turn in range(num_waves)
    ]
    return waves, singles


async def _single_ttfts_ms(address: str, load: Load) -> list[float]:
    requests = _requests(replace(load, num_new=4), _NUM_SINGLES, seed=0)
    async with Client(address) as client:
        await client.health(deadline_s=30)
        send = sending(client, temperature=TEMPERATURE, deadline_s=_LIMIT_S)
        seen = [await send(request) for request in requests]
    return [one.ttft_s * 1e3 for one in seen if one.ttft_s is not None]


async def curve(service: Service, load: Load, counts: tuple[int, ...]) -> dict[int, Wave]:
    """Return a wave for each number of streams, after a warm-up wave of `counts[-1]` streams."""
    await run_wave(service.address, load, counts[-1], 0)
    return {
        count: await run_wave(service.address, load, count, 1 + index)
        for index, count in enumerate(counts)
    }


async def run_wave(
    address: str,
    load: Load,
    num_streams: int,
    seed: int,
    client: tuple[str, str] = (sys.executable, __file__),
) -> Wave:
    """Run streams that start together; return the results. `client`: interpreter and program of a
    client process.
    """
    num_clients = min(_NUM_CLIENTS, num_streams)
    start_at = time.time() + (_LEAD_S if num_clients > 1 else _LEAD_S / 2)
    found = await asyncio.gather(
        *(
            asyncio.to_thread(
                _client,
                [
                    *client,
                    address,
                    num_streams // num_clients,
                    load.num_prompt,
                    load.num_new,
                    load.vocab_size,
                    100 * seed + i,
                    start_at,
                ],
            )
            for i in range(num_clients)
        )
    )
    return wave_of(
        ttft=np.concatenate([part["ttft"] for part in found]),
        itl=np.concatenate([part["itl"] for part in found]),
        num_tokens=sum(part["num_tokens"][0] for part in found),
        elapsed_s=max(part["elapsed_s"][0] for part in found),
    )


def wave_of(
    *,
    ttft: NDArray[np.float64] | list[float],
    itl: NDArray[np.float64] | list[float],
    num_tokens: float,
    elapsed_s: float,
) -> Wave:
    """Return the figures of a wave from the times of all its streams, in seconds."""
    return Wave(
        tokens_per_s=num_tokens / elapsed_s,
        ttft_p50_ms=float(np.percentile(ttft, 50)) * 1e3,
        itl_p50_ms=float(np.percentile(itl, 50)) * 1e3 if np.size(itl) else 0.0,
        itl_p99_ms=float(np.percentile(itl, 99)) * 1e3 if np.size(itl) else 0.0,
    )


def _client(arguments: list[object]) -> dict[str, list[float]]:
    # Its stderr is inherited.
    done = subprocess.run(
        [*map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def _requests(load: Load, count: int, seed: int) -> list[LoadRequest]:
    source = random.Random(seed)
    return [
        LoadRequest(
            ids=tuple(source.randrange(3, load.vocab_size) for _ in range(load.num_prompt)),
            num_tokens=load.num_new,
        )
        for _ in range(count)
    ]


async def _read(
    address: str, load: Load, num_streams: int, seed: int, start_at: float
) -> dict[str, list[float]]:
    """Read streams that start together; return TTFTs, times between messages and duration, in
    seconds, and the number of tokens.
    """
    requests = _requests(load, num_streams, seed)
    async with Client(address) as client:
        await client.health(deadline_s=30)
        await asyncio.sleep(max(0.0, start_at - time.time()))
        send = sending(client, temperature=TEMPERATURE, deadline_s=_LIMIT_S)
        seen = await open_loop(requests, send, _LIMIT_S)
        # From the first request on, because the loop prepares all requests before it.
        start_s = min(one.ended_s - one.total_s for one in seen)
        elapsed_s = max(one.ended_s for one in seen) - start_s
    itl = [at_s - before_s for one in seen for (before_s, _), (at_s, _) in pairwise(one.messages)]
    return {
        "ttft": [one.ttft_s for one in seen if one.ttft_s is not None],
        "itl": itl,
        "num_tokens": [sum(one.num_tokens for one in seen)],
        "elapsed_s": [elapsed_s],
    }


def _main() -> None:
    print_usage(__doc__, num_arguments=7)
    address, *numbers = sys.argv[1:]
    num_streams, num_prompt, num_new, vocab_size, seed = map(int, numbers[:5])
    load = Load(num_prompt=num_prompt, num_new=num_new, vocab_size=vocab_size)
    found = asyncio.run(_read(address, load, num_streams, seed, float(numbers[5])))
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
