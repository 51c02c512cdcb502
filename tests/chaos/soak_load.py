"""The clients of a soak test. They send requests of several kinds, and compare what they receive
with the correct outputs.

They use the Python client, which observes retry delays and resumes broken streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from penstock.client import (
    Accepted,
    CallSettings,
    Client,
    Finished,
    FinishReason,
    PenstockError,
    PoolConfig,
    ReaderStalled,
    RetryPolicy,
    Tokens,
)
from penstock.client.retry_budget import RetryBudget
from penstock.executor.models import resolve_model
from penstock.executor.simulated.vocabulary import generated_ids
from support.cut_relay import CutRelay, cut_relay
from support.simulated_output import simulated_token

Prompt = tuple[int, ...]
POISON, DEADLY = 21, 22
"""Tokens of a prompt: the first fails only its request, the second ends the engine process."""
NUM_CANARIES = 5
HUNG = "hung"
MIN_TOKENS, MAX_TOKENS, CANARY_TOKENS = 10, 80, 32
_RESUME_TIMEOUT_S = 30.0
_MOST_S = 90.0
"""Time limit of one request in seconds; one that takes longer counts as hung."""
_NUM_RELAYS = 2
_NUM_MEASURED = 24
_MOST_TRIED = 200
_CLOSE = 0.01
"""Up to this difference, two log probabilities count as equal; many times the rounding error."""


class Kind(enum.StrEnum):
    """The purpose of a request."""

    STEADY = "steady"
    CANCEL = "cancel"
    SLOW = "slow reader"
    POISON = "poison"
    BURST = "burst"
    CANARY = "canary"
    DEADLY = "deadly prompt"


_FAIL = (Kind.POISON, Kind.DEADLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """The sizes of one soak.

    `num_streams` streams run at all times, and `num_held` more in client processes that are stopped
    or killed; `burst_size` streams start at once every `burst_every_s` seconds. After `seconds` no
    new requests are sent. `is_torch`: the service runs the demo model instead of the simulated one,
    and scripts no faults.
    """

    seconds: float = 300.0
    seed: int = 1
    num_streams: int = 16
    num_held: int = 8
    burst_size: int = 64
    burst_every_s: float = 15.0
    fault_every_s: float = 7.0
    is_torch: bool = False


class EndCounts:
    """Counts the ends of requests. Keeps only sums and the causes of errors, so that memory is
    bounded.

    `wrong`: descriptions of unexpected tokens and sequence numbers. `by_minute`: number of requests
    that ended in each minute; `errors_by_minute`: number of requests that failed in each minute.
    """

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.num = Counter[Kind]()
        self.errors = Counter[tuple[Kind, str]]()
        self.wrong: list[str] = []
        self.num_tokens = 0
        self.by_minute = Counter[int]()
        self.errors_by_minute = Counter[int]()

    def add(self, kind: Kind, cause: str, num_tokens: int) -> None:
        minute = int((time.monotonic() - self.begun_s) // 60)
        self.num[kind] += 1
        self.num_tokens += num_tokens
        self.by_minute[minute] += 1
        if cause:
            self.errors[kind, cause] += 1
            self.errors_by_minute[minute] += 1

    @property
    def worst_minute(self) -> float:
        """The largest fraction of failed requests among all requests that ended in one minute."""
        minutes = self.by_minute.items()
        return max((self.errors_by_minute[at] / num for at, num in minutes), default=0.0)

    def num_errors(self, kind: Kind | None = None, text: str = "") -> int:
        """Return how many requests of a kind, or of all, failed with this text in their cause."""
        return sum(
            count
            for (failed, cause), count in self.errors.items()
            if kind in (None, failed) and text in cause
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """Draws prompts (`draw`), and returns the first tokens of their correct outputs (`tokens`)."""

    draw: Callable[[random.Random], Prompt]
    tokens: Callable[[Prompt, int], list[int]]

    def canary(self, number: int) -> Prompt:
        """Return one of the few prompts that are sent repeatedly."""
        return self.draw(random.Random(number % NUM_CANARIES))


def simulated_reference() -> Reference:
    """Return a reference for the simulated executor. The reference computes the output of any
    prompt.
    """
    folder = resolve_model("demo")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = generated_ids(folder, int(config["vocab_size"]))

    def tokens(prompt: Prompt, count: int) -> list[int]:
        ids = np.array(prompt, dtype=np.int32)
        positions = range(len(prompt), len(prompt) + count)
        return [simulated_token(ids, at, vocabulary) for at in positions]

    return Reference(lambda chance: _prompt(chance, chance.randint(4, 60)), tokens)


async def measured_reference(address: str, seed: int) -> Reference:
    """Return a reference of a few prompts whose outputs are recorded from the idle service.

    Contains only outputs in which no token has a close second in probability, so that rounding does
    not change them.
    """
    chance = random.Random(seed)
    known: dict[Prompt, list[int]] = {}
    async with Client(address) as client:
        for _ in range(_MOST_TRIED):
            prompt = _prompt(chance, 12)
            generation = await client.generate_once(
                prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2
            )
            records = generation.outputs[0].records
            tops = [record.top_logprobs for record in records]
            if all(first.logprob - second.logprob > _CLOSE for first, second in tops):
                known[prompt] = [record.id for record in records]
            if len(known) == _NUM_MEASURED:
                break
        else:
            raise AssertionError("the model is never sure of itself: there is no reference")
    prompts = list(known)
    return Reference(lambda chance: chance.choice(prompts), lambda prompt, n: known[prompt][:n])


def _prompt(chance: random.Random, length: int) -> Prompt:
    return tuple(chance.randint(50, 900) for _ in range(length))


class Load:
    """All clients. `run` returns when the plan's time is over and all requests have ended."""

    def __init__(self, plan: SoakPlan, relays: Sequence[CutRelay], reference: Reference) -> None:
        self.ledger = EndCounts()
        self.relays = relays
        self._plan = plan
        self._reference = reference
        self._until_s = time.monotonic() + plan.seconds
        self._num_canaries = 0
        self.resuming, self.plain = (
            Client(
                [relay.address for relay in relays],
                pool=PoolConfig(num_channels=4),
                resume_timeout_s=resume_timeout_s,
                settings=CallSettings(
                    retry=RetryPolicy(max_attempts=10_000, max_backoff_s=2.0),
                    budget=RetryBudget(reserve=1_000_000),
                ),
            )
            for resume_timeout_s in (_RESUME_TIMEOUT_S, None)
        )

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    async def run(self) -> None:
        """Run steady streams, bursts and canaries concurrently."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.num_streams):
                group.create_task(self._stream(random.Random(f"{self._plan.seed}/{number}")))
            group.create_task(self._bursts(random.Random(f"{self._plan.seed}/bursts")))
            while not self.is_over:
                group.create_task(self.canary())
                await self._pause(5.0)

    async def canary(self) -> tuple[str, float | None]:
        """Send one of the repeated prompts; return what `send` returns."""
        self._num_canaries += 1
        prompt = self._reference.canary(self._num_canaries)
        return await self.send(self.resuming, Kind.CANARY, prompt, CANARY_TOKENS)

    async def deadly(self) -> None:
        """Send a request that ends the engine process at its fourth token."""
        prompt = (*self._reference.canary(0), DEADLY)
        await self.send(self.plain, Kind.DEADLY, prompt, CANARY_TOKENS)

    async def send(
        self,
        client: Client,
        kind: Kind,
        prompt: Prompt,
        num_tokens: int,
        leaves_after: float = float("inf"),
    ) -> tuple[str, float | None]:
        """Send a request and read its stream; disconnect at the first event after
        `leaves_after` events.

        Return the cause of its error, "" if there is none, and the monotonic time of its first
        token, None without one.
        """
        received = _Received(self._reference.tokens(prompt, num_tokens))
        stream = client.generate(
            prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            return_token_ids=True,
        )
        try:
            async with asyncio.timeout(_MOST_S), contextlib.aclosing(stream) as events:
                num_events = 0
                async for event in events:
                    received.take(event)
                    num_events += 1
                    if num_events > leaves_after:
                        cause = ""
                        break
                    if kind is Kind.SLOW and num_events < 10:
                        await asyncio.sleep(0.3)  # so slowly does it read
                else:
                    cause = "was served" if kind in _FAIL else received.outcome()
        except TimeoutError:
            cause = HUNG
        except PenstockError as error:
            is_expected = (
                error.code is grpc.StatusCode.INTERNAL
                if kind in _FAIL
                else (kind is Kind.SLOW and isinstance(error, ReaderStalled))
            )
            place = f"after {len(received.tokens)} tokens"
            cause = "" if is_expected else f"{error.code.name} {error.reason} {place}"
        self.ledger.wrong += [f"{kind}: {what}" for what in received.wrong]
        self.ledger.add(kind, cause, len(received.tokens))
        return cause, received.first_token_s

    async def _stream(self, chance: random.Random) -> None:
        shares = {Kind.STEADY: 0.88, Kind.CANCEL: 0.1, Kind.SLOW: 0.01, Kind.POISON: 0.01}
        if self._plan.is_torch:
            del shares[Kind.POISON]
        while not self.is_over:
            (kind,) = chance.choices(list(shares), list(shares.values()))
            prompt = self._reference.draw(chance)
            num_tokens = chance.randint(MIN_TOKENS, MAX_TOKENS)
            leaves_after = float("inf")
            client = self.resuming if chance.random() < 0.95 else self.plain
            if kind is Kind.POISON:
                client, prompt = self.plain, (*prompt, POISON)
            elif kind is Kind.CANCEL:
                leaves_after = chance.randint(0, num_tokens // 2)
            await self.send(client, kind, prompt, num_tokens, leaves_after)

    async def _bursts(self, chance: random.Random) -> None:
        while True:
            await self._pause(self._plan.burst_every_s)
            if self.is_over:
                return
            prompts = [self._reference.draw(chance) for _ in range(self._plan.burst_size)]
            await asyncio.gather(
                *(self.send(self.resuming, Kind.BURST, one, MIN_TOKENS) for one in prompts)
            )

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, self._until_s - time.monotonic())))


class _Received:
    """What one request received, compared event by event with the expected tokens."""

    def __init__(self, expected: list[int]) -> None:
        self.expected = expected
        self.tokens: list[int] = []
        self.wrong: list[str] = []
        self.first_token_s: float | None = None
        self._next_sequence = 0
        self._end: Finished | None = None

    def take(self, event: object) -> None:
        if isinstance(event, Accepted):
            # A call that was retried starts again, but never after output.
            self._next_sequence = 0
            if self.tokens:
                self.wrong.append(f"accepted again after {len(self.tokens)} tokens")
        sequence = getattr(event, "sequence", -1)
        if sequence != self._next_sequence:
            self.wrong.append(f"message {sequence} in place of {self._next_sequence}")
        self._next_sequence = sequence + 1
        if isinstance(event, Tokens):
            self.first_token_s = self.first_token_s or time.monotonic()
            begin = len(self.tokens)
            self.tokens += [record.id for record in event.records]
            if self.tokens[begin:] != self.expected[begin : len(self.tokens)]:
                self.wrong.append(f"other tokens from {begin} on")
        elif isinstance(event, Finished):
            self._end = event

    def outcome(self) -> str:
        """Return what is missing in a stream that ended without an error, "" if it is complete.
        Adds an entry to `wrong` if the reported number of tokens differs from the received one.
        """
        if self._end is None:
            return "no end"
        (output,) = self._end.outputs
        if output.num_completion_tokens != len(self.tokens):
            self.wrong.append(f"{output.num_completion_tokens} tokens, {len(self.tokens)} received")
        if len(self.tokens) == len(self.expected) and output.finish_reason is FinishReason.LENGTH:
            return ""
        return (
            f"{output.finish_reason.name} after {len(self.tokens)} of {len(self.expected)} tokens"
        )


@contextlib.asynccontextmanager
async def loaded(plan: SoakPlan, address: str) -> AsyncGenerator[Load]:
    """Provide the clients for a service that is idle."""
    reference = (
        await measured_reference(address, plan.seed) if plan.is_torch else simulated_reference()
    )
    async with contextlib.AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(cut_relay(address)) for _ in range(_NUM_RELAYS)]
        load = Load(plan, relays, reference)
        await stack.enter_async_context(load.resuming)
        await stack.enter_async_context(load.plain)
        yield load
