"""Sends the requests of a benchmark in open or closed loops, and measures them at the client.

A loop calls `send` for each request; `sending` returns a `send` that uses Penstock's client.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.client import Client, Event, Finished, PenstockError, TokenPrompt, Tokens

TIMEOUT_S = 60.0
TENANT_KEY = "x-tenant"
"""The metadata key with the tenant of a request, for `--tenant-metadata-key` of the service."""


class Due(Protocol):
    """A request that is due `at_s` seconds after the start."""

    @property
    def at_s(self) -> float: ...


_Request = TypeVar("_Request", bound=Due)
_Seen = TypeVar("_Seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A request to send `at_s` seconds after the start. `name`: the request id, "" for a random
    one. `read_s`: pause of the reader after each token, seconds.
    """

    ids: tuple[int, ...] = (5, 6, 7, 8)
    num_tokens: int
    at_s: float = 0.0
    name: str = ""
    tenant: str = ""
    read_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """The outcome of a request.

    Attributes:
        messages: Seconds since sending and number of tokens of each message.
        end: "OK", or the error's reason; its status if it has no reason.
        code: The status of the call.
        queue_s, served_ttft_s: Queue time and TTFT as reported by the server; 0 if it reported
            none.
        has_retry_time: Whether the error has a retry time.
        ended_s: When the request ended, on the clock of `time.perf_counter`.
    """

    name: str = ""
    messages: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    total_s: float = 0.0
    ended_s: float = 0.0
    end: str = "OK"
    code: str = "OK"
    queue_s: float = 0.0
    served_ttft_s: float = 0.0
    has_retry_time: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None without a token."""
        return self.messages[0][0] if self.messages else None

    @property
    def num_tokens(self) -> int:
        return sum(num for _, num in self.messages)

    @property
    def gaps_s(self) -> list[float]:
        """The gap before each token except the first, seconds; 0 for all but the first token
        of a message.
        """
        gaps = [0.0] * (self.messages[0][1] - 1) if self.messages else []
        for (before_s, _), (at_s, num) in itertools.pairwise(self.messages):
            gaps += [at_s - before_s, *[0.0] * (num - 1)]
        return gaps


def arrivals_s(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Return the arrivals of a Poisson process within `duration_s`, seconds after the start."""
    random = np.random.default_rng(seed)
    gaps_s = random.exponential(1.0 / rate_per_s, int(2 * rate_per_s * duration_s) + 64)
    times: list[float] = np.cumsum(gaps_s)[np.cumsum(gaps_s) < duration_s].tolist()
    return times


async def open_loop(
    requests: Sequence[_Request],
    send: Callable[[_Request], Awaitable[_Seen]],
    limit_s: float = TIMEOUT_S,
) -> list[_Seen]:
    """Send each request at its time, regardless of earlier responses; return the results in the
    order of `requests`. Raises TimeoutError if a request has not ended `limit_s` after the last was
    sent.
    """
    start_s = time.perf_counter() + 0.05
    last_s = max((request.at_s for request in requests), default=0.0)

    async def one(request: _Request) -> _Seen:
        await asyncio.sleep(start_s + request.at_s - time.perf_counter())
        return await send(request)

    async with asyncio.timeout(last_s + limit_s):
        return list(await asyncio.gather(*map(one, requests)))


async def closed_loop(
    send: Callable[[int], Awaitable[None]], concurrency: int, duration_s: float
) -> None:
    """Run `concurrency` callers for `duration_s` seconds; each sends a request when its previous
    one has ended.

    `send` gets the index of the request; modulo `concurrency` it is the index of the caller.
    """
    end_s = time.monotonic() + duration_s

    async def caller(number: int) -> None:
        while time.monotonic() < end_s:
            await send(number)
            number += concurrency

    await asyncio.gather(*map(caller, range(concurrency)))


def sending(client: Client, **options: Any) -> Callable[[LoadRequest], Awaitable[RequestOutcome]]:
    """Return a function that sends a request over `client` with these generation options."""
    given: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0, **options}

    async def send(request: LoadRequest) -> RequestOutcome:
        named: dict[str, Any] = {"request_id": request.name} if request.name else {}
        events = client.generate(
            TokenPrompt(ids=request.ids),
            max_tokens=request.num_tokens,
            metadata=((TENANT_KEY, request.tenant),) if request.tenant else (),
            **named,
            **given,
        )
        return await read(events, request)

    return send


async def read(events: AsyncGenerator[Event], request: LoadRequest) -> RequestOutcome:
    """Read the events of a request; return its outcome. The first read sends the request."""
    sent_s = time.perf_counter()
    seen = RequestOutcome(name=request.name)
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Tokens) and event.num_tokens:
                    seen.messages.append((time.perf_counter() - sent_s, event.num_tokens))
                    if request.read_s:
                        await asyncio.sleep(request.read_s * event.num_tokens)
                elif isinstance(event, Finished):
                    seen.queue_s = event.timings.queue_s
                    seen.served_ttft_s = event.timings.ttft_s or 0.0
    except PenstockError as error:
        seen.end, seen.code = error.reason or error.code.name, error.code.name
        seen.has_retry_time = error.retry_after_s is not None
    seen.ended_s = time.perf_counter()
    seen.total_s = seen.ended_s - sent_s
    return seen
