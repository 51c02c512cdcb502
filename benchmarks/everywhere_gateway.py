"""Measures the smg gateway with two workers: added latency, draining, and prefix cache hits.

`ttft`: 32 streams through the gateway and directly to the workers, alternately, on the same
processes. `drain`: 32 callers send without pause while one worker drains and a third joins.
`prefix`: growing conversations that exceed the cache of one worker, with two routing policies of
the gateway.

The simulated executor has a real cache and queue; its step times come from the cost model.

    python benchmarks/everywhere_gateway.py [--full] [--json FILE]

Needs the gateway: `pip install smg`, and the extra `gateway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from event_stream import Answered, Caller, StreamFailed
from gateway_process import GatewayProcess, gateway_process
from load import LoadRequest, closed_loop, read
from penstock.client import ChatMessage, Client
from report import Check, arguments, at_least, at_most, conclude, print_table
from services import Service, service, simulated

MODEL = "demo"
NUM_STREAMS = 32
NUM_TOKENS = 32
STEP_S = 0.02
MAX_ADDED_TTFT_MS = 10.0
NUM_DIALOGUES, NUM_TURNS = 24, 6
NUM_TURN_WORDS = 40
POLICIES = ("round_robin", "cache_aware")
_RETRIES = ("--retry-max-retries", "2")
"""The retry setting of docs/gateway.md."""
_PREFILL_PRICE_S = 200e-6
"""Compute time of a prompt token that is not cached, seconds."""
_NUM_BLOCKS = 640
"""Size of a worker's cache: about 10,000 tokens, while the conversations have 18,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work per section."""

    num_rounds: int
    window_s: float


QUICK = Size(num_rounds=1, window_s=5.0)
WHOLE = Size(num_rounds=5, window_s=15.0)


def worker(*options: str) -> contextlib.AbstractContextManager[Service]:
    """Start a service that can be used as a worker of the gateway."""
    return service(*options, "--gateway", "smg", "--max-num-seqs", "64")


@contextlib.contextmanager
def two_workers(*options: str) -> Generator[tuple[Service, Service]]:
    with worker(*options) as first, worker(*options) as second:
        yield first, second


def prompt(number: int) -> list[dict[str, str]]:
    """Return a prompt that is unique to the call, so that none of it is cached."""
    words = random.Random(number).choices(("gate", "flow", "turbine", "river", "stone"), k=24)
    return [{"role": "user", "content": f"{number} " + " ".join(words)}]


async def through_gateway(port: int, window_s: float) -> list[float]:
    """Return the TTFT in seconds of streams that run one after another through the gateway."""
    found: list[float] = []

    callers = [Caller(port) for _ in range(NUM_STREAMS)]

    async def call(number: int) -> None:
        caller = callers[number % NUM_STREAMS]
        found.append((await caller.chat(prompt(number), NUM_TOKENS, MODEL)).ttft_s)

    await closed_loop(call, NUM_STREAMS, window_s)
    for one in callers:
        one.close()
    return found


async def straight(addresses: list[str], window_s: float) -> list[float]:
    """Return the TTFT in seconds of streams directly over gRPC; the client spreads them over the
    workers.
    """
    found: list[float] = []
    async with Client(addresses) as client:

        async def call(number: int) -> None:
            messages = [ChatMessage(role="user", content=prompt(number)[0]["content"])]
            events = client.chat(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
            found.append((await read(events, LoadRequest(num_tokens=NUM_TOKENS))).ttft_s or 0.0)

        await closed_loop(call, NUM_STREAMS, window_s)
    return found


async def ttft(size: Size) -> tuple[Any, list[Check]]:
    """Measure the latency that the gateway adds to the TTFT."""
    rounds: list[dict[str, float]] = []
    with two_workers(*simulated(STEP_S)) as (first, second):
        addresses = [first.address, second.address]
        async with gateway_process(*addresses, policy="round_robin") as gateway:
            await through_gateway(gateway.port, 1.0)  # warm-up: connections, caches, code
            await straight(addresses, 1.0)
            for _ in range(size.num_rounds):
                by_way = {
                    "gateway": await through_gateway(gateway.port, size.window_s),
                    "straight": await straight(addresses, size.window_s),
                }
                rounds.append(
                    {f"{way}_p50_ms": 1e3 * statistics.median(ms) for way, ms in by_way.items()}
                    | {f"{way}_num": float(len(ms)) for way, ms in by_way.items()}
                )
    print_table(
        f"Time to the first token, {NUM_STREAMS} streams", list(rounds[0]),
        [list(one.values()) for one in rounds],
    )  # fmt: skip
    added = [one["gateway_p50_ms"] - one["straight_p50_ms"] for one in rounds]
    return rounds, [
        at_most(
            "TTFT p50 added by the gateway at 32 streams",
            statistics.median(added),
            MAX_ADDED_TTFT_MS,
            "ms",
        )
    ]


async def drain(size: Size) -> tuple[Any, list[Check]]:
    """Keep callers sending without pause while workers drain and join."""
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

    options = simulated(STEP_S)
    with two_workers(*options) as (first, second), worker(*options) as third:
        async with gateway_process(
            first.address, second.address, policy="round_robin", options=_RETRIES
        ) as gateway:
            callers = [
                asyncio.create_task(caller(index, gateway.port)) for index in range(NUM_STREAMS)
            ]
            await asyncio.sleep(size.window_s / 3)
            await gateway.add_worker(third.address)
            first.process.send_signal(signal.SIGTERM)
            exit_code = await asyncio.to_thread(first.ended)
            await asyncio.sleep(size.window_s / 3)
            is_over.set()
            await asyncio.gather(*callers)
    results = {"num_requests": num_done, "failures": failures, "exit_code": exit_code}
    print_table(
        "One worker drains, a third joins", ("requests", "failed", "exit code"),
        [(num_done, len(failures), exit_code)],
    )  # fmt: skip
    return results, [
        at_most(
            "failed while one worker drains and a third joins",
            float(len(failures)),
            0.0,
            "requests",
            is_settled=num_done >= NUM_STREAMS,
        )
    ]


async def dialogue(number: int, gateway: GatewayProcess) -> list[Answered]:
    """Run a conversation turn by turn, each prompt with all turns before it."""
    draw = random.Random(number)
    messages: list[dict[str, str]] = []
    answers: list[Answered] = []
    caller = Caller(gateway.port)
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


async def prefix(size: Size) -> tuple[Any, list[Check]]:
    """Measure the cached share of prompt tokens, and its effect on the TTFT."""
    del size
    prices = {
        "step_s": 0.005,
        "prefill_token_s": _PREFILL_PRICE_S,
        "decode_slot_s": 0.0,
        "context_token_s": 0.0,
    }
    found: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        options = (*simulated(0.0, cost=prices), "--num-blocks", str(_NUM_BLOCKS))
        with two_workers(*options) as (first, second):
            async with gateway_process(first.address, second.address, policy=policy) as gateway:
                answered = await asyncio.gather(
                    *(dialogue(number, gateway) for number in range(NUM_DIALOGUES))
                )
        later = [answer for one in answered for answer in one[1:]]
        num_tokens = sum(answer.num_prompt_tokens for answer in later)
        found[policy] = {
            "cached_share": sum(answer.num_cached_tokens for answer in later) / num_tokens,
            "ttft_p50_ms": 1e3 * statistics.median(answer.ttft_s for answer in later),
            "ttft_mean_ms": 1e3 * statistics.fmean(answer.ttft_s for answer in later),
        }
    print_table(
        f"{NUM_DIALOGUES} dialogues of {NUM_TURNS} turns on two workers, turns after the first",
        ("policy", "cached share", "TTFT p50 ms", "TTFT mean ms"),
        [(policy, *values.values()) for policy, values in found.items()],
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


SECTIONS: dict[str, Callable[[Size], Coroutine[Any, Any, tuple[Any, list[Check]]]]] = {
    "ttft": ttft,
    "drain": drain,
    "prefix": prefix,
}


def measured(size: Size, names: Sequence[str] = ()) -> tuple[dict[str, Any], list[Check]]:
    """Run all sections, or those in `names`, and print them. Raises RunFailed, also if the gateway
    is not installed."""
    results: dict[str, Any] = {"size": asdict(size)}
    checks: list[Check] = []
    for name in names or SECTIONS:
        section = SECTIONS[name]
        print(name, file=sys.stderr)
        results[name], told = asyncio.run(section(size))
        checks += told
    return results, checks


def run(*, is_full: bool = False) -> list[Check]:
    """Measure, print and check. Raises RunFailed, also if the gateway is not installed."""
    return measured(WHOLE if is_full else QUICK)[1]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--sections", nargs="+", choices=tuple(SECTIONS), default=(), metavar="NAME"
    )
    given = parser.parse_args()
    results, checks = measured(WHOLE if given.full else QUICK, given.sections)
    conclude(given, results, checks)


if __name__ == "__main__":
    main()
