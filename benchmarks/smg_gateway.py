"""Measures smg, a gateway for OpenAI's HTTP API, in front of two workers.

`ttft`: compares the TTFT of 32 streams through the gateway with the TTFT of 32 streams directly to
the same workers, alternately. `drain`: 32 callers send without pause while one worker drains and a
third joins; no call may fail. `prefix`: compares two routing policies of the gateway, `round_robin`
and `cache_aware`, by prefix cache hit rate and TTFT, for conversations that together exceed the
cache of one worker.

The workers run the real scheduler and its prefix cache on the simulated executor, whose step times
come from a cost model.

    python benchmarks/smg_gateway.py [--full] [--part NAME]... [--json FILE]

Needs the extras `gateway` and `gateway-test`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from event_stream import Answered, Caller, StreamFailed
from load import LoadRequest, closed_loop, read
from penstock.client import ChatMessage, Client
from report import Measure, Outcome, RunFailed, arguments, at_least, at_most, print_rows, run_parts
from services import Service, service, simulated

MODEL = "demo"
NUM_STREAMS = 32
NUM_TOKENS = 32
STEP_S = 0.02
MAX_ADDED_TTFT_MS = 10.0
NUM_CONVERSATIONS, NUM_TURNS = 24, 6
NUM_TURN_WORDS = 40
POLICIES = ("round_robin", "cache_aware")
_TESTS = str(Path(__file__).resolve().parents[1] / "tests")
_RETRIES = ("--retry-max-retries", "2")
"""The retry setting of docs/gateway.md."""
_PREFILL_TOKEN_S = 200e-6
"""Compute time of a prompt token that is not cached, seconds."""
_NUM_BLOCKS = 640
"""Size of a worker's cache: about 10,000 tokens; all conversations together have 18,000."""


@contextlib.asynccontextmanager
async def gateway_for(*addresses: str, policy: str, retries: bool = False) -> AsyncGenerator[Any]:
    """Start the gateway in front of these workers, as the gateway's tests do. Raises RunFailed if
    it is not installed or does not serve.
    """
    sys.path.insert(0, _TESTS)
    from gateway import smg

    if missing := smg.missing_packages():
        raise RunFailed(f"not installed: {', '.join(missing)}")
    more = ("--load-monitor-interval", "1", *(_RETRIES if retries else ()))
    try:
        async with smg.gateway(*addresses, arguments=more, policy=policy) as made:
            yield made
    except AssertionError as error:
        raise RunFailed(f"the gateway does not serve: {error}") from error


def worker(*options: str) -> contextlib.AbstractContextManager[Service]:
    """Start a service that can be used as a worker of the gateway."""
    return service(*options, "--gateway", "smg", "--max-num-seqs", "64")


@contextlib.contextmanager
def two_workers(*options: str) -> Generator[tuple[Service, Service]]:
    with worker(*options) as first, worker(*options) as second:
        yield first, second


def prompt(number: int) -> list[dict[str, str]]:
    """Return a prompt that is unique to `number`, so that none of it is cached."""
    words = random.Random(number).choices(("gate", "flow", "turbine", "river", "stone"), k=24)
    return [{"role": "user", "content": f"{number} " + " ".join(words)}]


async def through_gateway(port: int, window_s: float) -> list[float]:
    """Send streams through the gateway, `NUM_STREAMS` at a time; return the TTFT of each in
    seconds.
    """
    found: list[float] = []

    callers = [Caller(port) for _ in range(NUM_STREAMS)]

    async def call(number: int) -> None:
        caller = callers[number % NUM_STREAMS]
        found.append((await caller.chat(prompt(number), NUM_TOKENS, MODEL)).ttft_s)

    await closed_loop(call, NUM_STREAMS, window_s)
    for one in callers:
        one.close()
    return found


async def direct(addresses: list[str], window_s: float) -> list[float]:
    """Send streams directly to the workers over gRPC, `NUM_STREAMS` at a time; return the TTFT of
    each in seconds. The client spreads the streams over the workers.
    """
    found: list[float] = []
    async with Client(addresses) as client:

        async def call(number: int) -> None:
            messages = [ChatMessage(role="user", content=prompt(number)[0]["content"])]
            events = client.chat(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
            found.append((await read(events, LoadRequest(num_tokens=NUM_TOKENS))).ttft_s or 0.0)

        await closed_loop(call, NUM_STREAMS, window_s)
    return found


async def ttft(options: Namespace) -> Outcome:
    """Measure the latency that the gateway adds to the TTFT."""
    num_rounds, window_s = (5, 15.0) if options.full else (1, 5.0)
    rounds: list[dict[str, float]] = []
    with two_workers(*simulated(STEP_S)) as (first, second):
        addresses = [first.address, second.address]
        async with gateway_for(*addresses, policy="round_robin") as gateway:
            await through_gateway(gateway.port, 1.0)  # warm-up: connections, caches, code
            await direct(addresses, 1.0)
            for _ in range(num_rounds):
                by_way = {
                    "gateway": await through_gateway(gateway.port, window_s),
                    "straight": await direct(addresses, window_s),
                }
                rounds.append(
                    {f"{way}_p50_ms": 1e3 * statistics.median(ms) for way, ms in by_way.items()}
                    | {f"{way}_num": float(len(ms)) for way, ms in by_way.items()}
                )
    print_rows(f"Time to the first token, {NUM_STREAMS} streams", rounds)
    added = [one["gateway_p50_ms"] - one["straight_p50_ms"] for one in rounds]
    return rounds, [
        at_most(
            "TTFT p50 added by the gateway at 32 streams",
            statistics.median(added),
            MAX_ADDED_TTFT_MS,
            "ms",
        )
    ]


async def drain(options: Namespace) -> Outcome:
    """Keep callers sending without pause while one worker drains and another joins."""
    failures: list[str] = []
    num_done = 0
    is_over = asyncio.Event()

    async def caller(index: int, port: int) -> None:
        nonlocal num_done
        own, number = Caller(port), index
        while not is_over.is_set():
            try:
                await own.chat(prompt(number), NUM_TOKENS, MODEL)
            except StreamFailed as error:
                failures.append(str(error))
            num_done += 1
            number += NUM_STREAMS
        own.close()

    steps = simulated(STEP_S)
    with two_workers(*steps) as (first, second), worker(*steps) as third:
        async with gateway_for(
            first.address, second.address, policy="round_robin", retries=True
        ) as gateway:
            callers = [
                asyncio.create_task(caller(index, gateway.port)) for index in range(NUM_STREAMS)
            ]
            await asyncio.sleep(5.0 if options.full else 2.0)
            await gateway.add_worker(third.address)
            first.process.send_signal(signal.SIGTERM)
            exit_code = await asyncio.to_thread(first.wait_for_exit)
            await asyncio.sleep(5.0 if options.full else 2.0)
            is_over.set()
            await asyncio.gather(*callers)
    results = {"num_requests": num_done, "failures": failures, "exit_code": exit_code}
    return results, [
        at_most(
            "failed while one worker drains and a third joins",
            float(len(failures)),
            0.0,
            "requests",
            is_settled=num_done >= NUM_STREAMS,
        )
    ]


async def conversation(number: int, port: int) -> list[Answered]:
    """Run a conversation, in which each prompt contains all earlier turns; return the responses."""
    draw = random.Random(number)
    messages: list[dict[str, str]] = []
    answers: list[Answered] = []
    caller = Caller(port)
    for _ in range(NUM_TURNS):
        words = draw.choices(
            ("gate", "flow", "turbine", "river", "stone", "wheel"), k=NUM_TURN_WORDS
        )
        messages.append({"role": "user", "content": " ".join(words)})
        answers.append(await caller.chat(messages, 8, MODEL))
        messages.append({"role": "assistant", "content": answers[-1].text})
        # Simulates the time a user takes to respond; meanwhile other conversations continue.
        await asyncio.sleep(draw.uniform(0.1, 0.4))
    caller.close()
    return answers


async def prefix(_: Namespace) -> Outcome:
    """Compare the routing policies of `POLICIES` by prefix cache hit rate (the share of prompt
    tokens found in the cache) and TTFT, after the first turn of each conversation.
    """
    cost = {
        "step_s": 0.005,
        "prefill_token_s": _PREFILL_TOKEN_S,
        "decode_slot_s": 0.0,
        "context_token_s": 0.0,
    }
    found: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        options = (*simulated(0.0, cost=cost), "--num-blocks", str(_NUM_BLOCKS))
        with two_workers(*options) as (first, second):
            async with gateway_for(first.address, second.address, policy=policy) as gateway:
                answered = await asyncio.gather(
                    *(conversation(number, gateway.port) for number in range(NUM_CONVERSATIONS))
                )
        later = [answer for one in answered for answer in one[1:]]
        num_tokens = sum(answer.num_prompt_tokens for answer in later)
        found[policy] = {
            "cached_share": sum(answer.num_cached_tokens for answer in later) / num_tokens,
            "ttft_p50_ms": 1e3 * statistics.median(answer.ttft_s for answer in later),
            "ttft_mean_ms": 1e3 * statistics.fmean(answer.ttft_s for answer in later),
        }
    print_rows(
        f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns on two workers, turns after the"
        " first",
        [{"policy": policy, **values} for policy, values in found.items()],
    )
    blind, aware = (found[policy] for policy in POLICIES)
    return found, [
        at_least(
            "cached share under cache_aware over that under round_robin",
            aware["cached_share"] / blind["cached_share"] if blind["cached_share"] else 0.0,
            1.2,
            "ratio",
        ),
        at_most(
            "mean TTFT under cache_aware over that under round_robin",
            aware["ttft_mean_ms"] / blind["ttft_mean_ms"],
            1.0,
            "ratio",
        ),
    ]


def _awaited(part: Callable[[Namespace], Coroutine[Any, Any, Outcome]]) -> Measure:
    return lambda options: asyncio.run(part(options))


if __name__ == "__main__":
    run_parts(arguments(__doc__), {part.__name__: _awaited(part) for part in (ttft, drain, prefix)})
