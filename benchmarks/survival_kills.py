"""What callers notice when processes of the service die, hang or are asked to go.

Owns the sections engine_kill, no_replay, hang, front_kill and drain of the survival benchmark. Each
round is a fresh service, so that no round's deaths count towards another's limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from live_service import LiveService, live_service, simulated
from report import Check, print_table
from survival_streams import Crowd, References, Told, connections, undisturbed

NUM_STREAMS = 64
NUM_FRONTS = 2
_IN_FLIGHT_S = 0.05
"""What was on its way when the engine died has arrived by then; none restarts so fast."""
_SEQS = ("--max-num-seqs", str(NUM_STREAMS))
_SIMULATED = (*simulated(), *_SEQS)
_MODELS: dict[str, tuple[tuple[str, ...], int]] = {
    "simulated": (_SIMULATED, 300),
    "demo model, float32": (("--dtype", "float32", *_SEQS), 160),
}
"""Options, and the tokens of each stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRound:
    """One kill. `restart_s`: to the new engine's being ready; `lag_s`: from there to the first
    token of the last of the streams. Counts over all streams."""

    model: str
    at_token: int
    num_lost: int
    num_wrong_tokens: int
    restart_s: float
    lag_s: float


def _bad(told: Sequence[Told]) -> list[str]:
    return [f"{one.status}: {one.details}" for one in told if one.status != "OK"]


async def _kill_round(model: str, number: int, references: dict[str, References]) -> KillRound:
    options, num_tokens = _MODELS[model]
    async with (
        live_service(*options, num_fronts=NUM_FRONTS) as service,
        connections(service.address) as channels,
    ):
        if model not in references:
            references[model] = await undisturbed(channels, NUM_STREAMS, num_tokens)
        at_token = 1 + number * num_tokens // 16
        crowd = Crowd(channels, references[model].ids, num_tokens)
        await crowd.until_each_has(at_token)
        killed_s = time.monotonic()
        os.kill(service.up["engine"][-1].pid, signal.SIGKILL)
        ready = await service.until_up("engine", len(service.up["engine"]) + 1)
        await crowd.until_ended()
    for line in _bad(crowd.told)[:3]:
        print(f"  {line}", file=sys.stderr)
    firsts = [one.first_after_s(killed_s + _IN_FLIGHT_S) for one in crowd.told]
    return KillRound(
        model=model,
        at_token=at_token,
        num_lost=len(_bad(crowd.told)),
        num_wrong_tokens=references[model].wrong(crowd),
        restart_s=ready.at_s - killed_s,
        lag_s=max((first - ready.at_s for first in firsts if first is not None), default=0.0),
    )


async def engine_kill(num_rounds: dict[str, int]) -> tuple[list[Any], list[Check]]:
    """kill -9 of the engine under 64 streams: what is lost, duplicated or missing, how long."""
    references: dict[str, References] = {}
    rounds: list[KillRound] = []
    for model in _MODELS:
        for number in range(num_rounds["simulated" if model == "simulated" else "demo"]):
            print(f"engine_kill: {model}, round {number + 1}", file=sys.stderr)
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
        _none(f"requests lost over {num_kills} kills", sum(r.num_lost for r in rounds), "requests"),
        _none(
            f"tokens duplicated, missing or other over {num_kills} kills",
            sum(r.num_wrong_tokens for r in rounds),
            "tokens",
        ),
        _at_most("last first token after the new engine is up", max(r.lag_s for r in rounds), 1.0),
    ]


def _none(name: str, value: int, unit: str) -> Check:
    return Check(name=name, value=value, goal=0, unit=unit, sense="at most")


def _at_most(name: str, value: float, goal: float, unit: str = "s") -> Check:
    return Check(name=name, value=value, goal=goal, unit=unit, sense="at most")


async def no_replay(num_rounds: int) -> tuple[list[Any], list[Check]]:
    """The same without replay: every stream is told at once."""
    found: list[dict[str, float]] = []
    for number in range(num_rounds):
        print(f"no_replay: round {number + 1}", file=sys.stderr)
        async with (
            live_service(*_SIMULATED, "--max-replays", "0", num_fronts=NUM_FRONTS) as service,
            connections(service.address) as channels,
        ):
            crowd = Crowd(channels, range(NUM_STREAMS), 900)
            await crowd.until_each_has(2)
            killed_s = time.monotonic()
            os.kill(service.up["engine"][-1].pid, signal.SIGKILL)
            await crowd.until_ended()
            last_s = max(one.ended_s for one in crowd.told) - killed_s
            num_told = sum(one.status == "UNAVAILABLE" for one in crowd.told)
            found.append({"last_told_s": last_s, "num_unavailable": num_told})
    print_table(
        "kill -9 of the engine, no replay",
        ("last told s", "UNAVAILABLE"),
        [(one["last_told_s"], one["num_unavailable"]) for one in found],
    )
    return found, [
        _at_most(
            "without replay: last stream ended UNAVAILABLE",
            max(f["last_told_s"] for f in found),
            1.0,
        ),
        Check(
            name="without replay: streams ended UNAVAILABLE, worst round",
            value=min(f["num_unavailable"] for f in found),
            goal=NUM_STREAMS,
            unit="streams",
            sense="at least",
        ),
    ]


async def hang(limit_s: float = 3.0) -> tuple[list[Any], list[Check]]:
    """SIGSTOP of the engine: found by its heart beat, killed, and replayed."""
    print("hang", file=sys.stderr)
    limit = ("--engine-hang-s", str(limit_s))
    async with (
        live_service(*_SIMULATED, *limit, num_fronts=NUM_FRONTS) as service,
        connections(service.address) as channels,
    ):
        references = await undisturbed(channels, NUM_STREAMS, 300)
        crowd = Crowd(channels, references.ids, 300)
        await crowd.until_each_has(20)
        stopped_s = time.monotonic()
        os.kill(service.up["engine"][-1].pid, signal.SIGSTOP)
        ready = await service.until_up("engine", 2)
        await crowd.until_ended()
    found = {
        "limit_s": limit_s,
        "restarted_s": ready.at_s - stopped_s,
        "num_lost": len(_bad(crowd.told)),
        "num_wrong_tokens": references.wrong(crowd),
    }
    print_table("SIGSTOP of the engine", tuple(found), [tuple(found.values())])
    return [found], [
        _at_most(
            f"hung engine replaced, of which {limit_s:g} s are the limit",
            float(found["restarted_s"]),
            limit_s + 5.0,
        ),
        _none("hung engine: requests lost", int(found["num_lost"]), "requests"),
        _none("hung engine: tokens wrong", int(found["num_wrong_tokens"]), "tokens"),
    ]


async def front_kill() -> tuple[list[Any], list[Check]]:
    """kill -9 of one of two fronts: its streams are told at once, the other's notice nothing."""
    print("front_kill", file=sys.stderr)
    async with (
        live_service(*_SIMULATED, num_fronts=NUM_FRONTS) as service,
        connections(service.address) as channels,
    ):
        references = await undisturbed(channels, NUM_STREAMS, 300)
        crowd = Crowd(channels, references.ids, 300)
        await crowd.until_each_has(20)
        killed_s = time.monotonic()
        os.kill(service.up["front"][0].pid, signal.SIGKILL)
        ready = await service.until_up("front", NUM_FRONTS + 1)
        await crowd.until_ended()
    lost = [one for one in crowd.told if one.status != "OK"]
    kept = [
        (index, told)
        for index, told in zip(crowd.indices, crowd.told, strict=True)
        if told.status == "OK"
    ]
    found = {
        "num_lost": len(lost),
        "num_not_unavailable": sum(one.status != "UNAVAILABLE" for one in lost),
        "last_told_s": max((one.ended_s - killed_s for one in lost), default=0.0),
        "restarted_s": ready.at_s - killed_s,
        "num_kept": len(kept),
        "num_wrong_tokens": sum(references.wrong_of(index, told) for index, told in kept),
    }
    print_table("kill -9 of a front", tuple(found), [tuple(found.values())])
    return [found], [
        _at_most("killed front: last of its streams ended", float(found["last_told_s"]), 0.1),
        _none("killed front: not UNAVAILABLE", int(found["num_not_unavailable"]), "streams"),
        _none("killed front: wrong on the other front", int(found["num_wrong_tokens"]), "tokens"),
    ]


async def _watch_health(service: LiveService, has_watch: asyncio.Event) -> None:
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
            has_watch.set()


async def drain(grace_s: float = 2.0) -> tuple[list[Any], list[Check]]:
    """SIGTERM under streams longer than the grace, with an open health watch and no collector."""
    print("drain", file=sys.stderr)
    options = ("--drain-grace-s", str(grace_s), "--otlp-endpoint", "http://127.0.0.1:9")
    async with (
        live_service(*_SIMULATED, *options, num_fronts=NUM_FRONTS) as service,
        connections(service.address) as channels,
    ):
        has_watch = asyncio.Event()
        watching = asyncio.create_task(_watch_health(service, has_watch))
        await has_watch.wait()
        crowd = Crowd(channels, range(NUM_STREAMS), 900)
        await crowd.until_each_has(2)
        asked_s = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        code = await service.process.wait()
        over_s = time.monotonic() - asked_s - grace_s
        await crowd.until_ended()
        await asyncio.gather(watching, return_exceptions=True)
    found = {
        "grace_s": grace_s,
        "over_s": over_s,
        "exit_code": code,
        "num_unavailable": sum(one.status == "UNAVAILABLE" for one in crowd.told),
    }
    print_table("SIGTERM under streams", tuple(found), [tuple(found.values())])
    return [found], [
        _at_most("drain: exit after the grace", over_s, 2.0),
        _none("drain: exit code", code, ""),
        Check(
            name="drain: streams ended UNAVAILABLE",
            value=found["num_unavailable"],
            goal=NUM_STREAMS,
            unit="streams",
            sense="at least",
        ),
    ]
