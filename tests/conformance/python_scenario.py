"""Helpers of the Python scenarios: their input, checks of expectations, and checked streams."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, Unpack

from penstock.client import (
    NO_RETRY,
    Accepted,
    Client,
    Event,
    Finished,
    FinishReason,
    GenerationOptions,
    ResumePoint,
    Tokens,
)

PROMPT = "The old lighthouse keeper climbed the stairs"
CALL_S = 50.0
"""The deadline of calls that do not test deadlines; a scenario has 60 s."""
LONG_TOKENS = 10_000


class ExpectationFailed(Exception):
    """An expectation of a scenario failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioInput:
    """The input of a scenario. `ready` notifies the driver; `until_go` does so and waits for the
    answer "go".
    """

    address: str
    ready: Callable[[], None]
    until_go: Callable[[], Awaitable[None]]

    def client(self) -> Client:
        """Return a client with a new connection that does not retry."""
        return Client(self.address, retry=NO_RETRY)


Check: TypeAlias = Callable[[ScenarioInput], Awaitable[None]]


def require(holds: bool, why: str) -> None:
    if not holds:
        raise ExpectationFailed(why)


def new_id() -> str:
    return f"conformance-{uuid.uuid4()}"


def greedy(num_tokens: int, **more: Unpack[GenerationOptions]) -> GenerationOptions:
    return {**more, "temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens}


class CheckedStream:
    """The events of one stream as they are read, each checked against the previous one.

    The client also rejects gaps; they are checked again because the client is under test.
    """

    def __init__(self, events: AsyncGenerator[Event, None], *, next_sequence: int = 0) -> None:
        self._events = events
        self._next_sequence = next_sequence
        self.point = ResumePoint(request_id="")
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.chunks: list[Tokens] = []

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [record.id for chunk in self.chunks for record in chunk.records]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.finished.outputs[0].finish_reason if self.finished is not None else None

    async def until_accepted(self) -> Accepted:
        while self.accepted is None:
            await self._read()
        return self.accepted

    async def until_tokens(self, num_tokens: int = 1) -> None:
        while self.num_tokens < num_tokens:
            await self._read()

    async def until_end(self) -> Finished:
        while self.finished is None:
            await self._read()
        late = await anext(self._events, None)
        require(late is None, f"an event after finished: {late}")
        return self.finished

    async def leave(self) -> None:
        await self._events.aclose()

    async def _read(self) -> None:
        event = await anext(self._events, None)
        if event is None:
            raise ExpectationFailed("the stream ended without finished")
        sequence = event.sequence
        require(sequence == self._next_sequence, f"sequence {sequence}, not {self._next_sequence}")
        self._next_sequence += 1
        self.point = self.point.after(event)
        is_first = sequence == 0
        require(isinstance(event, Accepted) == is_first, f"message {sequence} is {event}")
        if isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, Tokens):
            self.chunks.append(event)
        elif isinstance(event, Finished):
            self.finished = event
