"""Reads many concurrent streams, and compares their tokens with the expected output.

This is the client side of the survival benchmark. Its client neither retries nor resumes, so that
recovery is due to the service alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from penstock.client import NO_RETRY, Client, PenstockError, PoolConfig, TokenPrompt, Tokens
from report import RunFailed

NUM_CHANNELS = 8
"""Number of connections, enough for every front to get some of the streams."""
LIMIT_S = 120.0
MIN_MARGIN = 1e-4
"""Minimum difference between the log probabilities of the two likeliest tokens, at every position
of a reference. With a smaller difference, the order of float32 additions may change the choice.
This order differs between keys and values computed in a prefill and those computed token by token.
"""


@dataclass(slots=True)
class Received:
    """The data received by one stream.

    `stamps_s`: arrival time of each message with tokens. `num_skips`: number of messages out of
    sequence. `margin`: the smallest difference of log probability between a token and the next most
    likely one, if requested. `status` is empty while the stream is open.
    """

    ids: list[int] = field(default_factory=list[int])
    stamps_s: list[float] = field(default_factory=list[float])
    num_messages: int = 0
    num_skips: int = 0
    margin: float = math.inf
    status: str = ""
    details: str = ""
    ended_s: float = 0.0

    def first_after_s(self, at_s: float) -> float | None:
        """Return when the first message with tokens after `at_s` arrived; None if there is none."""
        return next((stamp for stamp in self.stamps_s if stamp > at_s), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The expected outputs, from undisturbed streams: token ids by the index of the request."""

    ids: dict[int, list[int]]

    def wrong(self, streams: ConcurrentStreams) -> int:
        """Count missing, duplicated and wrong tokens, and messages out of sequence."""
        pairs = zip(streams.indices, streams.received, strict=True)
        return sum(self.wrong_of(index, received) for index, received in pairs)

    def wrong_of(self, index: int, received: Received) -> int:
        """Count one stream's missing, duplicated and wrong tokens, and messages out of sequence."""
        pairs = zip_longest(received.ids, self.ids[index])
        return received.num_skips + [one == other for one, other in pairs].count(False)


def prompt(index: int) -> TokenPrompt:
    """Return a prompt that is unique to the index."""
    return TokenPrompt(ids=tuple(60 + (37 * index + 11 * i) % 400 for i in range(8 + index % 24)))


class ConcurrentStreams:
    """Concurrent greedy streams, one for each of `indices`, spread over the connections."""

    def __init__(
        self,
        client: Client,
        indices: Iterable[int],
        num_tokens: int,
        num_logprobs: int | None = None,
    ) -> None:
        self.indices = tuple(indices)
        self.received = [Received() for _ in self.indices]
        self._client = client
        self._num_tokens = num_tokens
        self._num_logprobs = num_logprobs
        self._has_updates = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._follow(index, received))
            for index, received in zip(self.indices, self.received, strict=True)
        ]

    async def wait_until_each_has(self, num_tokens: int) -> None:
        """Wait until every stream has `num_tokens` tokens or has ended. Raises TimeoutError after
        two minutes.
        """
        async with asyncio.timeout(LIMIT_S):
            while not all(len(one.ids) >= num_tokens or one.status for one in self.received):
                self._has_updates.clear()
                await self._has_updates.wait()

    async def wait_until_ended(self) -> None:
        """Wait until all streams have ended. Raises RunFailed if a stream hangs."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*self._tasks)
        except TimeoutError:
            num_open = sum(not one.status for one in self.received)
            raise RunFailed(f"{num_open} streams hang") from None

    async def _follow(self, index: int, received: Received) -> None:
        status = "OK"
        events = self._client.generate(
            prompt(index),
            temperature=0.0,
            max_tokens=self._num_tokens,
            ignore_eos=True,
            return_token_ids=True,
            logprobs=self._num_logprobs,
        )
        try:
            async for event in events:
                received.num_skips += event.sequence != received.num_messages
                received.num_messages += 1
                if isinstance(event, Tokens):
                    for record in event.records:
                        received.ids.append(record.id)
                        top = [one.logprob for one in record.top_logprobs]
                        if len(top) > 1:
                            received.margin = min(received.margin, top[0] - top[1])
                    received.stamps_s.append(time.monotonic())
                    self._has_updates.set()
        except PenstockError as error:
            status, received.details = error.code.name, str(error)
        received.ended_s = time.monotonic()
        received.status = status
        self._has_updates.set()


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncGenerator[Client]:
    """Yield a client with NUM_CHANNELS connections."""
    pool = PoolConfig(num_channels=NUM_CHANNELS)
    async with Client(address, retry=NO_RETRY, pool=pool) as client:
        yield client


async def undisturbed(client: Client, num_streams: int, num_tokens: int) -> References:
    """Run streams without faults; return the outputs of `num_streams` of them whose tokens all have
    a margin of at least `MIN_MARGIN`. Raises RunFailed if there are fewer.
    """
    streams = ConcurrentStreams(client, range(num_streams * 3 // 2), num_tokens, num_logprobs=2)
    await streams.wait_until_ended()
    clear = {
        index: received.ids
        for index, received in zip(streams.indices, streams.received, strict=True)
        if len(received.ids) == num_tokens and received.margin >= MIN_MARGIN
    }
    if len(clear) < num_streams:
        ends = {f"{received.status} {received.details}" for received in streams.received}
        raise RunFailed(
            f"{len(clear)} of {len(streams.received)} requests can be compared; ends: {ends}"
        )
    return References(ids={index: clear[index] for index in sorted(clear)[:num_streams]})
