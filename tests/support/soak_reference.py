"""What every prompt of a soak must be answered with, token for token.

Owns the prompts and their reference outputs. The simulated model's are computed here, from the
definition of its tokens; those of a real model are asked for before anything goes wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Protocol

import grpc.aio
import numpy as np

from penstock.executor.models import resolve_model
from penstock.executor.simulated.tokens import origin_of, tokens_at
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.service import PATIENCE_S
from support.stepped_service import ids_of, request

Prompt = tuple[int, ...]
NUM_CANARIES = 5
_FIRST_USUAL, _LAST_USUAL = 50, 900
_NUM_MEASURED = 24
_MOST_TRIED = 200
_CLOSE = 0.01
"""Natural logarithms of two probabilities that rounding might exchange, many times over."""


def vocab_size() -> int:
    """Of the model that comes along."""
    config = json.loads((resolve_model("demo") / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


class Reference(Protocol):
    """Prompts, and what follows them."""

    def draw(self, chance: random.Random) -> Prompt:
        """A prompt for a usual request."""
        ...

    def canary(self, number: int) -> Prompt:
        """One of the prompts that are asked again and again."""
        ...

    def tokens(self, prompt: Prompt, count: int) -> list[int]:
        """The first `count` tokens after it."""
        ...


class SimulatedReference:
    """Any prompt at all."""

    def __init__(self) -> None:
        self._vocab_size = vocab_size()

    def draw(self, chance: random.Random) -> Prompt:
        return tuple(
            chance.randint(_FIRST_USUAL, _LAST_USUAL) for _ in range(chance.randint(4, 60))
        )

    def canary(self, number: int) -> Prompt:
        return tuple(range(60 + number, 100 + number))

    def tokens(self, prompt: Prompt, count: int) -> list[int]:
        origin = np.array([origin_of(np.array(prompt, dtype=np.int32))], dtype=np.uint64)
        positions = np.arange(len(prompt), len(prompt) + count, dtype=np.int64)
        return [int(token) for token in tokens_at(origin, positions, self._vocab_size)]


class MeasuredReference:
    """A few prompts whose outputs a model reported when nothing was wrong."""

    def __init__(self, known: dict[Prompt, list[int]]) -> None:
        self._known = known
        self._prompts = list(known)

    def draw(self, chance: random.Random) -> Prompt:
        return chance.choice(self._prompts)

    def canary(self, number: int) -> Prompt:
        return self._prompts[number % NUM_CANARIES]

    def tokens(self, prompt: Prompt, count: int) -> list[int]:
        return self._known[prompt][:count]


async def measured(channel: grpc.aio.Channel, max_tokens: int, seed: int) -> MeasuredReference:
    """Ask a quiet service, one prompt after the other."""
    chance = random.Random(seed)
    stub = pb_grpc.GenerationServiceStub(channel)
    known: dict[Prompt, list[int]] = {}
    for _ in range(_MOST_TRIED):
        if len(known) == _NUM_MEASURED:
            return MeasuredReference(known)
        prompt: Prompt = tuple(chance.randint(_FIRST_USUAL, _LAST_USUAL) for _ in range(12))
        message = request(max_tokens, prompt)
        message.output.logprobs = 2
        responses = [r async for r in stub.Generate(message, timeout=PATIENCE_S)]
        if _is_decided(responses):
            known[prompt] = ids_of(responses)
    raise AssertionError("the model is never sure of itself: there is no reference")


def _is_decided(responses: Sequence[pb.GenerateResponse]) -> bool:
    """Whether no token was close to another one, so that no batch's rounding chooses the other."""
    return all(
        record.top_logprobs[0].logprob - record.top_logprobs[1].logprob > _CLOSE
        for response in responses
        if response.WhichOneof("event") == "tokens"
        for record in response.tokens.records
    )


def marked(prompt: Sequence[int], token: int) -> Prompt:
    """The prompt with a token in it that no client draws."""
    return (*prompt, token)
