"""Many live streams: what each received and when, compared with the expected output.

Owns the callers' side of the survival benchmark: raw calls of the generated stub, without a
client's retry or resumption, so that every repair is the service's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import grpc.aio

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from services import RunFailed

NUM_CHANNELS = 8
"""Connections, so that every front has some of the streams."""
LIMIT_S = 120.0
MIN_MARGIN = 1e-4
"""Minimum difference between the log probabilities of the two likeliest tokens, at every position
of a reference. Two closer tokens may change places with the order in which float32 sums are made,
which differs between keys computed with a prompt and keys computed alone."""


@dataclass(slots=True)
class Told:
    """What one stream received. `stamps_s`: arrival time of each message with tokens, and the
    number of tokens until then. `num_skips`: messages out of sequence. `margin`: the smallest
    difference between a token and the next likeliest, if requested. `status` is empty while the
    stream is open."""

    ids: list[int] = field(default_factory=list)
    stamps_s: list[tuple[float, int]] = field(default_factory=list)
    num_messages: int = 0
    num_skips: int = 0
    margin: float = math.inf
    status: str = ""
    details: str = ""
    ended_s: float = 0.0

    def first_after_s(self, at_s: float) -> float | None:
        """Return when the first message with tokens after `at_s` arrived."""
        return next((stamp for stamp, _ in self.stamps_s if stamp > at_s), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The output of undisturbed streams: `ids` by the index of the request."""

    ids: dict[int, list[int]]

    def wrong(self, crowd: Crowd) -> int:
        """Count tokens missing, duplicated or wrong, and messages out of sequence."""
        pairs = zip(crowd.indices, crowd.told, strict=True)
        return sum(self.wrong_of(index, told) for index, told in pairs)

    def wrong_of(self, index: int, told: Told) -> int:
        """Count them for one stream."""
        pairs = zip_longest(told.ids, self.ids[index])
        return told.num_skips + [one == other for one, other in pairs].count(False)


def request(index: int, num_tokens: int, num_logprobs: int | None = None) -> pb.GenerateRequest:
    """Return a greedy request with a unique prompt for each index, answered with token ids."""
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend(
        [60 + (37 * index + 11 * i) % 400 for i in range(8 + index % 24)]
    )
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = num_tokens
    message.stopping.ignore_eos = True
    message.output.return_token_ids = True
    if num_logprobs is not None:
        message.output.logprobs = num_logprobs
    return message


class Crowd:
    """Concurrent calls, one for each of `indices`, spread over the connections."""

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        indices: Iterable[int],
        num_tokens: int,
        num_logprobs: int | None = None,
    ) -> None:
        self.indices = tuple(indices)
        self.told = [Told() for _ in self.indices]
        self._has_news = asyncio.Event()
        stubs = [pb_grpc.GenerationServiceStub(channel) for channel in channels]
        self._tasks = [
            asyncio.create_task(
                self._follow(
                    stubs[number % len(stubs)].Generate(request(index, num_tokens, num_logprobs)),
                    told,
                )
            )
            for number, (index, told) in enumerate(zip(self.indices, self.told, strict=True))
        ]

    async def until_each_has(self, num_tokens: int) -> None:
        """Wait until every stream has `num_tokens` tokens or has ended."""
        async with asyncio.timeout(LIMIT_S):
            while not all(len(one.ids) >= num_tokens or one.status for one in self.told):
                self._has_news.clear()
                await self._has_news.wait()

    async def until_ended(self) -> None:
        """Wait until all streams have ended. Raises RunFailed if a stream hangs."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*self._tasks)
        except TimeoutError:
            num_open = sum(not one.status for one in self.told)
            raise RunFailed(f"{num_open} streams hang") from None

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _follow(
        self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse], told: Told
    ) -> None:
        status = "OK"
        try:
            async for message in call:
                told.num_skips += message.sequence != told.num_messages
                told.num_messages += 1
                if message.HasField("tokens"):
                    for record in message.tokens.records:
                        told.ids.append(record.id)
                        top = [one.logprob for one in record.top_logprobs]
                        if len(top) > 1:
                            told.margin = min(told.margin, top[0] - top[1])
                    told.stamps_s.append((time.monotonic(), len(told.ids)))
                    self._has_news.set()
        except grpc.aio.AioRpcError as error:
            status, told.details = error.code().name, error.details() or ""
        told.ended_s = time.monotonic()
        told.status = status
        self._has_news.set()


@contextlib.asynccontextmanager
async def connections(address: str) -> AsyncGenerator[list[grpc.aio.Channel]]:
    """Yield NUM_CHANNELS connections, none shared."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(NUM_CHANNELS)
        ]


async def undisturbed(
    channels: Sequence[grpc.aio.Channel], num_streams: int, num_tokens: int
) -> References:
    """Return references of `num_streams` requests whose tokens all have at least `MIN_MARGIN`."""
    crowd = Crowd(channels, range(num_streams * 3 // 2), num_tokens, num_logprobs=2)
    await crowd.until_ended()
    clear = {
        index: told.ids
        for index, told in zip(crowd.indices, crowd.told, strict=True)
        if len(told.ids) == num_tokens and told.margin >= MIN_MARGIN
    }
    if len(clear) < num_streams:
        ends = {f"{told.status} {told.details}" for told in crowd.told}
        raise RunFailed(f"{len(clear)} of {len(crowd.told)} requests can be compared; ends: {ends}")
    return References(ids={index: clear[index] for index in sorted(clear)[:num_streams]})
