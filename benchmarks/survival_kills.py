"""Measures the effect on clients when processes of the service die, hang or are stopped.

Contains the parts engine_kill, no_replay, hang, front_kill and drain of the survival benchmark.
Each round uses a fresh service, so that its crashes do not count towards another round's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.client import Client
from report import Outcome, at_least, at_most, print_rows, progress
from services import Service, service, simulated
from survival_streams import ConcurrentStreams, Received, References, connected, undisturbed

NUM_STREAMS = 64
NUM_FRONTS = 2
_HANG_S, _DRAIN_TIMEOUT_S = 3.0, 2.0
_IN_FLIGHT_S = 0.05
"""Seconds after a kill until messages in flight have arrived; shorter than any restart of an
engine.
"""
_SEQS = ("--max-num-seqs", str(NUM_STREAMS))
_SIMULATED = (*simulated(0.01), *_SEQS)
_MODELS: dict[str, tuple[tuple[str, ...], int]] = {
    "simulated": (_SIMULATED, 300),
    "demo model, float32": (("--dtype", "float32", *_SEQS), 160),
}
"""By kind of model: options, and number of tokens per stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRound:
    """The results of one kill. `restart_s`: time until the new engine is ready; `lag_s`: time from
    then until the last stream receives its next token. Counts cover all streams."""

    model: str
    at_token: int
    num_lost: int
    num_wrong_tokens: int
    restart_s: float
    lag_s: float


@contextlib.asynccontextmanager
async def serving(*options: str) -> AsyncGenerator[tuple[Service, Client]]:
    """Start a service with two fronts; yield the service and a connected client."""
    with service(*options, num_fronts=NUM_FRONTS) as found:
        async with connected(found.address) as client:
            yield found, client


def _bad(received: Sequence[Received]) -> list[Received]:
    return [one for one in received if one.status != "OK"]


def _num_unavailable(streams: ConcurrentStreams) -> int:
    return sum(one.status == "UNAVAILABLE" for one in streams.received)


async def _kill_round(model: str, number: int, references: dict[str, References]) -> KillRound:
    options, num_tokens = _MODELS[model]
    async with serving(*options) as (live, client):
        if model not in references:
            references[model] = await undisturbed(client, NUM_STREAMS, num_tokens)
        at_token = 1 + number * num_tokens // 16
        streams = ConcurrentStreams(client, references[model].ids, num_tokens)
        await streams.wait_until_each_has(at_token)
        killed_s = time.monotonic()
        os.kill(live.up["engine"][-1].pid, signal.SIGKILL)
        ready = await asyncio.to_thread(live.wait_until_ready, "engine", len(live.up["engine"]) + 1)
        await streams.wait_until_ended()
    for one in _bad(streams.received)[:3]:
        progress(f"  {one.status}: {one.details}")
    firsts = [one.first_after_s(killed_s + _IN_FLIGHT_S) for one in streams.received]
    return KillRound(
        model=model,
        at_token=at_token,
        num_lost=len(_bad(streams.received)),
        num_wrong_tokens=references[model].wrong(streams),
        restart_s=ready.at_s - killed_s,
        lag_s=max((first - ready.at_s for first in firsts if first is not None), default=0.0),
    )


async def engine_kill(options: Namespace) -> Outcome:
    """Kill the engine (kill -9) under 64 streams; count lost requests and wrong tokens, measure the
    restart."""
    references: dict[str, References] = {}
    rounds: list[KillRound] = []
    num_rounds = (10, 10) if options.full else (2, 1)
    for model, count in zip(_MODELS, num_rounds, strict=True):
        for number in range(count):
            progress(f"  {model}, round {number + 1}")
            rounds.append(await _kill_round(model, number, references))
    print_rows(f"kill -9 of the engine under {NUM_STREAMS} streams", rounds)
    kills = f"over {len(rounds)} kills"
    num_wrong = sum(one.num_wrong_tokens for one in rounds)
    lag_s = max(one.lag_s for one in rounds)
    return rounds, [
        at_most(f"requests lost {kills}", sum(one.num_lost for one in rounds), 0, "requests"),
        at_most(f"tokens duplicated, missing or other {kills}", num_wrong, 0, "tokens"),
        at_most("last first token after the new engine is up", lag_s, 1.0, "s"),
    ]


async def no_replay(options: Namespace) -> Outcome:
    """Kill the engine with replay disabled: every stream must fail immediately; measure the time
    until the service serves again.
    """
    rows: list[dict[str, object]] = []
    last_s, worst = 0.0, NUM_STREAMS
    for model, _ in itertools.product(_MODELS, range(10 if options.full else 2)):
        async with serving(*_MODELS[model][0], "--max-replays", "0") as (live, client):
            streams = ConcurrentStreams(client, range(NUM_STREAMS), 900)
            await streams.wait_until_each_has(2)
            killed_s = time.monotonic()
            os.kill(live.up["engine"][-1].pid, signal.SIGKILL)
            await streams.wait_until_ended()
            ready = await asyncio.to_thread(live.wait_until_ready, "engine", 2)
        ended_s = max(one.ended_s for one in streams.received) - killed_s
        last_s, worst = max(last_s, ended_s), min(worst, _num_unavailable(streams))
        rows.append(
            {
                "model": model,
                "last_status_s": ended_s,
                "num_unavailable": _num_unavailable(streams),
                "serving_again_s": ready.at_s - killed_s,
            }
        )
    print_rows("kill -9 of the engine, no replay", rows)
    name = "without replay: streams ended UNAVAILABLE, worst round"
    return rows, [
        at_most("without replay: last stream ended UNAVAILABLE", last_s, 1.0, "s"),
        at_least(name, worst, NUM_STREAMS, "streams"),
    ]


async def hang(_: Namespace) -> Outcome:
    """Stop the engine (SIGSTOP): the missing heartbeat must be detected, the engine killed and its
    requests replayed.
    """
    async with serving(*_SIMULATED, "--engine-hang-s", str(_HANG_S)) as (live, client):
        references = await undisturbed(client, NUM_STREAMS, 300)
        streams = ConcurrentStreams(client, references.ids, 300)
        await streams.wait_until_each_has(20)
        stopped_s = time.monotonic()
        os.kill(live.up["engine"][-1].pid, signal.SIGSTOP)
        ready = await asyncio.to_thread(live.wait_until_ready, "engine", 2)
        await streams.wait_until_ended()
    restarted_s, num_lost = ready.at_s - stopped_s, len(_bad(streams.received))
    name = f"hung engine replaced, of which {_HANG_S:g} s are the limit"
    return {"restarted_s": restarted_s, "num_lost": num_lost}, [
        at_most(name, restarted_s, _HANG_S + 5.0, "s"),
        at_most("hung engine: requests lost", num_lost, 0, "requests"),
        at_most("hung engine: tokens wrong", references.wrong(streams), 0, "tokens"),
    ]


async def front_kill(_: Namespace) -> Outcome:
    """Kill one of two fronts (kill -9): its streams must fail immediately, and the streams of the
    other front must not be affected.
    """
    async with serving(*_SIMULATED) as (live, client):
        references = await undisturbed(client, NUM_STREAMS, 300)
        streams = ConcurrentStreams(client, references.ids, 300)
        await streams.wait_until_each_has(20)
        killed_s = time.monotonic()
        os.kill(live.up["front"][0].pid, signal.SIGKILL)
        ready = await asyncio.to_thread(live.wait_until_ready, "front", NUM_FRONTS + 1)
        await streams.wait_until_ended()
    lost = _bad(streams.received)
    last_s = max((one.ended_s - killed_s for one in lost), default=0.0)
    num_odd = sum(one.status != "UNAVAILABLE" for one in lost)
    num_wrong = sum(
        references.wrong_of(index, received)
        for index, received in zip(streams.indices, streams.received, strict=True)
        if received.status == "OK"
    )
    return {"num_lost": len(lost), "restarted_s": ready.at_s - killed_s}, [
        at_most("killed front: last of its streams ended", last_s, 0.1, "s"),
        at_most("killed front: not UNAVAILABLE", num_odd, 0, "streams"),
        at_most("killed front: wrong on the other front", num_wrong, 0, "tokens"),
    ]


async def _watch_health(address: str, has_watch: asyncio.Event) -> None:
    # The client has no call for it.
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
            has_watch.set()


async def drain(_: Namespace) -> Outcome:
    """Send SIGTERM during streams longer than the drain timeout, with an open health watch and no
    collector."""
    options = ("--drain-timeout-s", str(_DRAIN_TIMEOUT_S), "--otlp-endpoint", "http://127.0.0.1:9")
    async with serving(*_SIMULATED, *options) as (live, client):
        has_watch = asyncio.Event()
        watching = asyncio.create_task(_watch_health(live.address, has_watch))
        await has_watch.wait()
        streams = ConcurrentStreams(client, range(NUM_STREAMS), 900)
        await streams.wait_until_each_has(2)
        asked_s = time.monotonic()
        live.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(live.process.wait)
        over_s = time.monotonic() - asked_s - _DRAIN_TIMEOUT_S
        await streams.wait_until_ended()
        await asyncio.gather(watching, return_exceptions=True)
    num_unavailable = _num_unavailable(streams)
    return {"over_s": over_s, "exit_code": code}, [
        at_most("drain: exit after the drain timeout", over_s, 2.0, "s"),
        at_most("drain: exit code", code, 0),
        at_least("drain: streams ended UNAVAILABLE", num_unavailable, NUM_STREAMS, "streams"),
    ]
