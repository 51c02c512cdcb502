"""The effect on clients when processes of the service die, hang or are stopped.

Contains the sections engine_kill, no_replay, hang, front_kill and drain of the survival benchmark.
Each round uses a fresh service, so that its crashes do not count towards another round's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from report import Check, at_least, at_most, print_table, progress
from services import Service, service, simulated
from survival_streams import ConcurrentStreams, Received, References, connections, undisturbed

NUM_STREAMS = 64
NUM_FRONTS = 2
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
async def serving(*options: str) -> AsyncGenerator[tuple[Service, list[grpc.aio.Channel]]]:
    """Start a service with two fronts; yield it and connections to it."""
    with service(*options, num_fronts=NUM_FRONTS) as found:
        async with connections(found.address) as channels:
            yield found, channels


def _bad(received: Sequence[Received]) -> list[str]:
    return [f"{one.status}: {one.details}" for one in received if one.status != "OK"]


async def _kill_round(model: str, number: int, references: dict[str, References]) -> KillRound:
    options, num_tokens = _MODELS[model]
    async with serving(*options) as (live, channels):
        if model not in references:
            references[model] = await undisturbed(channels, NUM_STREAMS, num_tokens)
        at_token = 1 + number * num_tokens // 16
        streams = ConcurrentStreams(channels, references[model].ids, num_tokens)
        await streams.until_each_has(at_token)
        killed_s = time.monotonic()
        os.kill(live.up["engine"][-1].pid, signal.SIGKILL)
        ready = await asyncio.to_thread(live.until_up, "engine", len(live.up["engine"]) + 1)
        await streams.until_ended()
    for line in _bad(streams.received)[:3]:
        progress(f"  {line}")
    firsts = [one.first_after_s(killed_s + _IN_FLIGHT_S) for one in streams.received]
    return KillRound(
        model=model,
        at_token=at_token,
        num_lost=len(_bad(streams.received)),
        num_wrong_tokens=references[model].wrong(streams),
        restart_s=ready.at_s - killed_s,
        lag_s=max((first - ready.at_s for first in firsts if first is not None), default=0.0),
    )


async def engine_kill(num_rounds: dict[str, int]) -> tuple[list[Any], list[Check]]:
    """Kill the engine (kill -9) under 64 streams; count lost requests and wrong tokens, measure the
    restart."""
    references: dict[str, References] = {}
    rounds: list[KillRound] = []
    for model in _MODELS:
        for number in range(num_rounds["simulated" if model == "simulated" else "demo"]):
            progress(f"engine_kill: {model}, round {number + 1}")
            rounds.append(await _kill_round(model, number, references))
    print_table(
        f"kill -9 of the engine under {NUM_STREAMS} streams over {NUM_FRONTS} fronts",
        ("model", "at token", "lost", "wrong tokens", "restart s", "then first token s"),
        [
            (r.model, r.at_token, r.num_lost, r.num_wrong_tokens, r.restart_s, r.lag_s)
            for r in rounds
        ],
    )
    num_kills = len(rounds)
    return [asdict(r) for r in rounds], [
        at_most(
            f"requests lost over {num_kills} kills", sum(r.num_lost for r in rounds), 0, "requests"
        ),
        at_most(
            f"tokens duplicated, missing or other over {num_kills} kills",
            sum(r.num_wrong_tokens for r in rounds),
            0,
            "tokens",
        ),
        at_most(
            "last first token after the new engine is up", max(r.lag_s for r in rounds), 1.0, "s"
        ),
    ]


async def no_replay(num_rounds: int) -> tuple[list[Any], list[Check]]:
    """Kill the engine with replay disabled: every stream must fail immediately; measure the time
    until the service serves again.
    """
    found: list[dict[str, Any]] = []
    for model, number in itertools.product(_MODELS, range(num_rounds)):
        progress(f"no_replay: {model}, round {number + 1}")
        async with serving(*_MODELS[model][0], "--max-replays", "0") as (live, channels):
            streams = ConcurrentStreams(channels, range(NUM_STREAMS), 900)
            await streams.until_each_has(2)
            killed_s = time.monotonic()
            os.kill(live.up["engine"][-1].pid, signal.SIGKILL)
            await streams.until_ended()
            ready = await asyncio.to_thread(live.until_up, "engine", 2)
        found.append(
            {
                "model": model,
                "last_status_s": max(one.ended_s for one in streams.received) - killed_s,
                "num_unavailable": sum(one.status == "UNAVAILABLE" for one in streams.received),
                "serving_again_s": ready.at_s - killed_s,
            }
        )
    header = ("model", "last received s", "UNAVAILABLE", "serving again s")
    print_table("kill -9 of the engine, no replay", header, [tuple(one.values()) for one in found])
    last_s = max(one["last_status_s"] for one in found)
    worst = min(one["num_unavailable"] for one in found)
    return found, [
        at_most("without replay: last stream ended UNAVAILABLE", last_s, 1.0, "s"),
        at_least(
            "without replay: streams ended UNAVAILABLE, worst round",
            worst,
            NUM_STREAMS,
            "streams",
        ),
    ]


async def hang(limit_s: float = 3.0) -> tuple[list[Any], list[Check]]:
    """Stop the engine (SIGSTOP): the missing heartbeat must be detected, the engine killed and its
    requests replayed.
    """
    progress("hang")
    limit = ("--engine-hang-s", str(limit_s))
    async with serving(*_SIMULATED, *limit) as (live, channels):
        references = await undisturbed(channels, NUM_STREAMS, 300)
        streams = ConcurrentStreams(channels, references.ids, 300)
        await streams.until_each_has(20)
        stopped_s = time.monotonic()
        os.kill(live.up["engine"][-1].pid, signal.SIGSTOP)
        ready = await asyncio.to_thread(live.until_up, "engine", 2)
        await streams.until_ended()
    found = {
        "limit_s": limit_s,
        "restarted_s": ready.at_s - stopped_s,
        "num_lost": len(_bad(streams.received)),
        "num_wrong_tokens": references.wrong(streams),
    }
    print_table("SIGSTOP of the engine", tuple(found), [tuple(found.values())])
    return [found], [
        at_most(
            f"hung engine replaced, of which {limit_s:g} s are the limit",
            float(found["restarted_s"]),
            limit_s + 5.0,
            "s",
        ),
        at_most("hung engine: requests lost", int(found["num_lost"]), 0, "requests"),
        at_most("hung engine: tokens wrong", int(found["num_wrong_tokens"]), 0, "tokens"),
    ]


async def front_kill() -> tuple[list[Any], list[Check]]:
    """Kill one of two fronts (kill -9): its streams must fail immediately, those of the other front
    must not be affected.
    """
    progress("front_kill")
    async with serving(*_SIMULATED) as (live, channels):
        references = await undisturbed(channels, NUM_STREAMS, 300)
        streams = ConcurrentStreams(channels, references.ids, 300)
        await streams.until_each_has(20)
        killed_s = time.monotonic()
        os.kill(live.up["front"][0].pid, signal.SIGKILL)
        ready = await asyncio.to_thread(live.until_up, "front", NUM_FRONTS + 1)
        await streams.until_ended()
    lost = [one for one in streams.received if one.status != "OK"]
    kept = [
        (index, received)
        for index, received in zip(streams.indices, streams.received, strict=True)
        if received.status == "OK"
    ]
    found = {
        "num_lost": len(lost),
        "num_not_unavailable": sum(one.status != "UNAVAILABLE" for one in lost),
        "last_status_s": max((one.ended_s - killed_s for one in lost), default=0.0),
        "restarted_s": ready.at_s - killed_s,
        "num_kept": len(kept),
        "num_wrong_tokens": sum(references.wrong_of(index, received) for index, received in kept),
    }
    print_table("kill -9 of a front", tuple(found), [tuple(found.values())])
    return [found], [
        at_most("killed front: last of its streams ended", float(found["last_status_s"]), 0.1, "s"),
        at_most("killed front: not UNAVAILABLE", int(found["num_not_unavailable"]), 0, "streams"),
        at_most(
            "killed front: wrong on the other front", int(found["num_wrong_tokens"]), 0, "tokens"
        ),
    ]


async def _watch_health(live: Service, has_watch: asyncio.Event) -> None:
    async with grpc.aio.insecure_channel(live.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
            has_watch.set()


async def drain(grace_s: float = 2.0) -> tuple[list[Any], list[Check]]:
    """Send SIGTERM during streams longer than the grace period, with an open health watch and no
    collector."""
    progress("drain")
    options = ("--drain-grace-s", str(grace_s), "--otlp-endpoint", "http://127.0.0.1:9")
    async with serving(*_SIMULATED, *options) as (live, channels):
        has_watch = asyncio.Event()
        watching = asyncio.create_task(_watch_health(live, has_watch))
        await has_watch.wait()
        streams = ConcurrentStreams(channels, range(NUM_STREAMS), 900)
        await streams.until_each_has(2)
        asked_s = time.monotonic()
        live.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(live.process.wait)
        over_s = time.monotonic() - asked_s - grace_s
        await streams.until_ended()
        await asyncio.gather(watching, return_exceptions=True)
    found = {
        "grace_s": grace_s,
        "over_s": over_s,
        "exit_code": code,
        "num_unavailable": sum(one.status == "UNAVAILABLE" for one in streams.received),
    }
    print_table("SIGTERM under streams", tuple(found), [tuple(found.values())])
    return [found], [
        at_most("drain: exit after the grace", over_s, 2.0, "s"),
        at_most("drain: exit code", code, 0),
        at_least(
            "drain: streams ended UNAVAILABLE", found["num_unavailable"], NUM_STREAMS, "streams"
        ),
    ]
