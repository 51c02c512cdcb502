"""`penstock serve` on a GPU under many streams, read by client processes on the same machine.

gpu_service.py ADDRESS STREAMS PROMPT_TOKENS OUTPUT_TOKENS SEED START_AT     one client process
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from live_service import LiveService, live_service
from penstock.client import Client
from penstock.client.events import Tokens
from penstock.client.prompt import TokenPrompt
from usage import tell_usage

_NUM_CLIENTS = 8
_LEAD_S = 3.0
_LIMIT_S = 120.0
_VOCAB_SIZE = 128_256


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """What streams that all start at once got."""

    tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


async def served(
    folder: Path,
    num_streams: int,
    *,
    num_prompt: int,
    num_new: int,
    num_waves: int,
    budget: int,
) -> tuple[list[Wave], list[float]]:
    """Waves of streams, and the TTFT of single requests since the service was ready, ms."""
    async with _service(folder, budget) as service:
        singles = [
            (await _wave(service.address, 1, num_prompt, 4, seed)).ttft_p50_ms for seed in range(5)
        ]
        waves = [
            await _wave(service.address, num_streams, num_prompt, num_new, 100 + turn)
            for turn in range(num_waves)
        ]
    return waves, singles


async def curve(
    folder: Path, counts: tuple[int, ...], *, num_prompt: int, num_new: int, budget: int
) -> dict[int, Wave]:
    """By number of streams, what they get; the last of them first, to warm up."""
    async with _service(folder, budget) as service:
        await _wave(service.address, counts[-1], num_prompt, num_new, 0)
        return {
            count: await _wave(service.address, count, num_prompt, num_new, 1 + index)
            for index, count in enumerate(counts)
        }


def _service(folder: Path, budget: int) -> AbstractAsyncContextManager[LiveService]:
    """Requests share no prefix; all else is as the service has it on a GPU."""
    return live_service(
        *("--model", str(folder), "--device", "cuda"),
        *("--prefix-caching", "off", "--max-seq-len", "8192"),
        *("--max-num-batched-tokens", str(budget)),
        num_fronts=8,
    )


async def _wave(address: str, num_streams: int, num_prompt: int, num_new: int, seed: int) -> Wave:
    num_clients = min(_NUM_CLIENTS, num_streams)
    start_at = time.time() + (_LEAD_S if num_clients > 1 else _LEAD_S / 2)
    found = await asyncio.gather(
        *(
            asyncio.to_thread(
                _client,
                [
                    address,
                    num_streams // num_clients,
                    num_prompt,
                    num_new,
                    100 * seed + i,
                    start_at,
                ],
            )
            for i in range(num_clients)
        )
    )
    ttft = np.concatenate([part["ttft"] for part in found]) * 1e3
    itl = np.concatenate([part["itl"] for part in found]) * 1e3
    num_tokens = sum(part["num_tokens"][0] for part in found)
    elapsed_s = max(part["elapsed_s"][0] for part in found)
    return Wave(
        tokens_per_s=num_tokens / elapsed_s,
        ttft_p50_ms=float(np.percentile(ttft, 50)),
        itl_p50_ms=float(np.percentile(itl, 50)) if len(itl) else 0.0,
        itl_p99_ms=float(np.percentile(itl, 99)) if len(itl) else 0.0,
    )


def _client(arguments: list[object]) -> dict[str, list[float]]:
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


async def _read(
    address: str, num_streams: int, num_prompt: int, num_new: int, seed: int, start_at: float
) -> dict[str, list[float]]:
    """Read streams that start together; seconds."""
    source = random.Random(seed)
    ttft: list[float] = []
    itl: list[float] = []
    num_tokens = 0
    async with Client(address) as client:
        await client.health(deadline_s=30)
        prompts = [
            TokenPrompt(ids=tuple(source.randrange(3, _VOCAB_SIZE) for _ in range(num_prompt)))
            for _ in range(num_streams)
        ]
        await asyncio.sleep(max(0.0, start_at - time.time()))
        start_s = time.perf_counter()

        async def read(prompt: TokenPrompt) -> None:
            nonlocal num_tokens
            last_s = time.perf_counter()
            is_first = True
            async for event in client.generate(
                prompt, max_tokens=num_new, ignore_eos=True, temperature=1.0, deadline_s=_LIMIT_S
            ):
                if isinstance(event, Tokens):
                    now_s = time.perf_counter()
                    (ttft if is_first else itl).append(now_s - last_s)
                    num_tokens += event.num_tokens
                    last_s, is_first = now_s, False

        await asyncio.gather(*map(read, prompts))
        elapsed_s = time.perf_counter() - start_s
    return {"ttft": ttft, "itl": itl, "num_tokens": [num_tokens], "elapsed_s": [elapsed_s]}


def _main() -> None:
    tell_usage(__doc__, num_arguments=6)
    address, *numbers = sys.argv[1:]
    num_streams, num_prompt, num_new, seed = map(int, numbers[:4])
    found = asyncio.run(_read(address, num_streams, num_prompt, num_new, seed, float(numbers[4])))
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
