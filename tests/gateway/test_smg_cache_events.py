"""The real gateway follows which blocks its workers have cached, and routes requests by them.

The prompts that fill the caches are sent to the workers directly, so that the gateway cannot route
by its own earlier requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from gateway.smg import Gateway, gateway, openai_client
from penstock.client import Client, TextPrompt
from support.service import Service, simulated, started

WORKER = (*simulated(), "--gateway", "smg", "--fronts", "1")
APPLIED = "KV event relay snapshot applied"
NUM_PROMPTS = 6


def prompt(number: int, topic: str = "river") -> str:
    return f"story {number} of a {topic}, its dam and the water in the pipe. " * 6


async def fill(worker: Service, text: str) -> int:
    """Send a prompt to the worker directly; return the number of blocks that are then cached."""
    async with Client(worker.address) as client:
        wanted = TextPrompt(text=text, add_special_tokens=False)
        answer = await client.generate_once(wanted, max_tokens=4, temperature=0.0)
    usage = answer.finished.usage
    # The last token is never computed.
    return (usage.num_prompt_tokens + usage.num_completion_tokens - 1) // 16


async def num_cached(made: Gateway, text: str) -> int:
    body = {"model": "demo", "prompt": text, "max_tokens": 4, "temperature": 0.0}
    answer: Any = await made.post("/v1/completions", body)
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"]


async def test_the_gateway_routes_by_cached_blocks() -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(started(*WORKER)) for _ in range(2)]
        river = [await fill(workers[num % 2], prompt(num)) for num in range(NUM_PROMPTS)]
        made = await stack.enter_async_context(
            gateway(*(worker.address for worker in workers), policy="cache_aware")
        )

        # Blocks that were cached before the gateway subscribed.
        await made.until_logged(APPLIED, 2)
        assert all([await num_cached(made, prompt(num)) for num in range(NUM_PROMPTS)])

        # Blocks that are cached after it subscribed.
        lake = [await fill(workers[1], prompt(num, "lake")) for num in range(NUM_PROMPTS)]
        num_blocks = sum(river[1::2]) + sum(lake)
        second = f"grpc://{workers[1].address}"
        await made.until_metric("smg_kv_index_blocks", num_blocks, worker=second)
        assert all([await num_cached(made, prompt(num, "lake")) for num in range(NUM_PROMPTS)])
        assert made.num_lines("does not implement SubscribeKvEvents") == 0


async def test_the_gateway_receives_every_loss_and_a_stream_survives_its_engine() -> None:
    async with (
        started(*WORKER) as worker,
        gateway(worker.address, policy="cache_aware") as made,
        openai_client(made) as client,
    ):
        address = f"grpc://{worker.address}"
        await made.until_logged(APPLIED)
        num_blocks = await fill(worker, prompt(1))
        await made.until_metric("smg_kv_index_blocks", num_blocks, worker=address)

        # If a front dies, its streams end: the gateway subscribes again and starts over.
        os.kill(await worker.next_pid("front"), signal.SIGKILL)
        await made.until_logged("KV event replay cursor expired")
        await made.until_logged(APPLIED, 2)
        await made.until_metric("smg_kv_index_blocks", num_blocks, worker=address)

        # If an engine dies, its cache is lost and its streams pause: the front continues them at
        # the same token with the next engine.
        await made.until_healthy()
        ask = {"model": "demo", "prompt": "once", "max_tokens": 200, "temperature": 0.0}
        whole = await client.completions.create(**ask)
        texts: list[str] = []
        async for chunk in await client.completions.create(**ask, stream=True):
            texts += [choice.text for choice in chunk.choices]
            if len(texts) == 20:
                os.kill(await worker.next_pid("engine"), signal.SIGKILL)
        assert "".join(texts) == whole.choices[0].text
        await made.until_logged(APPLIED, 3)
        assert '"blocks":0' in [line for line in made.lines if APPLIED in line][-1]
        await made.until_healthy()
        assert await num_cached(made, prompt(1)) == 0
        assert await num_cached(made, prompt(1)) > 0
