"""Requests that come when a list says so, and what their clients see of them.

Owns the load and the clients' figures. Does not know what is slow, nor why.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from penstock.client import NO_RETRY, ChannelConfig, Client, PenstockError, Tokens
from picture_svg import seconds

TENANT_KEY = "x-tenant"
_FIRST_ID = 300
_NUM_IDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that comes at `at_s`. `name` is its id.

    `read_s`: how long its reader takes over each token before it reads on; such a reader has a
    connection of its own, on which little is under way.
    """

    name: str
    at_s: float
    num_prompt_tokens: int
    num_tokens: int
    tenant: str = ""
    read_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client saw. Seconds from sending; `ttft_s` None without a token, `longest_gap_s` None
    with fewer than two messages of them. `end`: "OK", or the error's reason."""

    name: str
    ttft_s: float | None
    longest_gap_s: float | None
    total_s: float
    num_tokens: int
    end: str


class NarrowLine(ChannelConfig):
    """A connection whose reader takes a kilobyte at a time, as over a bad network."""

    __slots__ = ()

    def options(self, target: str = "") -> tuple[tuple[str, int | str], ...]:
        """See `ChannelConfig`."""
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        return (*super().options(target), *narrow)


async def drive(address: str, asks: Sequence[Ask]) -> list[Answer]:
    """All of them, each on time; the answers in the order of `asks`."""
    begun_s = time.monotonic()
    async with (
        Client(address, retry=NO_RETRY) as client,
        Client(address, retry=NO_RETRY, channel=NarrowLine()) as narrow,
    ):

        async def one(number: int, ask: Ask) -> Answer:
            await asyncio.sleep(max(0.0, begun_s + ask.at_s - time.monotonic()))
            return await _answer(narrow if ask.read_s else client, number, ask)

        return await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))


async def _answer(client: Client, number: int, ask: Ask) -> Answer:
    sent_s = time.monotonic()
    came_s: list[float] = []
    num_tokens, end = 0, "OK"
    events = client.generate(
        # Prompts that share nothing.
        [_FIRST_ID + (number + place * 7) % _NUM_IDS for place in range(ask.num_prompt_tokens)],
        request_id=ask.name,
        metadata=((TENANT_KEY, ask.tenant),) if ask.tenant else (),
        deadline_s=60.0,
        max_tokens=ask.num_tokens,
        ignore_eos=True,
        temperature=0.0,
    )
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Tokens):
                    came_s.append(time.monotonic())
                    num_tokens += event.num_tokens
                    if ask.read_s:
                        await asyncio.sleep(ask.read_s * event.num_tokens)
    except PenstockError as error:
        end = error.reason or error.code.name
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(came_s)]
    return Answer(
        name=ask.name,
        ttft_s=came_s[0] - sent_s if came_s else None,
        longest_gap_s=max(gaps_s, default=None),
        total_s=time.monotonic() - sent_s,
        num_tokens=num_tokens,
        end=end,
    )


def figures_of(answers: Sequence[Answer], prefix: str) -> dict[str, str]:
    """What the clients whose requests' names begin with `prefix` would report."""
    its = [each for each in answers if each.name.startswith(prefix)]
    ended_well = [each for each in its if each.end == "OK"]
    errors = [each.end for each in its if each.end != "OK"]
    ends = f"{len(ended_well)} OK" if ended_well else ""
    for reason in dict.fromkeys(errors):
        ends += f"{', ' if ends else ''}{errors.count(reason)} {reason}"
    return {
        "first token, median; worst": _spread([e.ttft_s for e in its if e.ttft_s is not None]),
        "longest gap between tokens, median; worst": _spread(
            [each.longest_gap_s for each in its if each.longest_gap_s is not None]
        ),
        "whole answer, median; worst": _spread([each.total_s for each in its]),
        "ended": ends,
    }


def _spread(values_s: Sequence[float]) -> str:
    if not values_s:
        return "-"
    if len(values_s) == 1:
        return seconds(values_s[0])
    return f"{seconds(statistics.median(values_s))}; {seconds(max(values_s))}"
