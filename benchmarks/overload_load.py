"""An open loop of short generations, a health probe beside it, and what both saw.

Owns the sending and the times as a client has them. Speaks gRPC with bytes, so that the client's
own work is small beside what it measures. Does not know what is made of it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2, prompt_pb2

_GENERATE = "/penstock.v1.GenerationService/Generate"
_PUSHBACK = "grpc-retry-pushback-ms"
_PATIENCE_S = 60.0
_PROBE_EVERY_S = 0.05


@dataclass(slots=True)
class Seen:
    """What the clients of one load saw; times in seconds, of the client, from sending.

    `served`: (end, TTFT) of each that was served, the end since the load began. `refused_s`: how
    long each RESOURCE_EXHAUSTED took. `num_untold`: of those, without a time to come back.
    `others`: how often each other status came. `probe_s`: health checks; `num_not_serving` of them
    said something else than SERVING. `lag_s`: how late the client's own loop woke up, which is in
    every other time: what it cannot see it cannot blame on the service.
    """

    served: list[tuple[float, float]] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    num_untold: int = 0
    others: dict[str, int] = field(default_factory=dict)
    probe_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    num_not_serving: int = 0


def message(num_tokens: int) -> bytes:
    """A request of four tokens for so many."""
    return pb.GenerateRequest(
        token_prompt=prompt_pb2.TokenPrompt(ids=[5, 6, 7, 8]),
        sampling=options_pb2.SamplingOptions(temperature=0.0),
        stopping=options_pb2.StoppingOptions(max_tokens=num_tokens, ignore_eos=True),
    ).SerializeToString()


def arrivals_s(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Poisson arrivals, seconds after the start."""
    random = np.random.default_rng(seed)
    gaps_s = random.exponential(1.0 / rate_per_s, int(2 * rate_per_s * duration_s) + 64)
    times: list[float] = np.cumsum(gaps_s)[np.cumsum(gaps_s) < duration_s].tolist()
    return times


async def drive(port: int, rate_per_s: float, duration_s: float, num_tokens: int) -> Seen:
    """Send for so long, whatever is answered meanwhile; return when the last has ended."""
    seen, data = Seen(), message(num_tokens)
    own = [("grpc.use_local_subchannel_pool", 1)]
    address = f"127.0.0.1:{port}"
    async with (
        grpc.aio.insecure_channel(address, options=own) as channel,
        grpc.aio.insecure_channel(address, options=own) as aside,
    ):
        method: Any = channel.unary_stream(_GENERATE)
        await asyncio.wait_for(channel.channel_ready(), _PATIENCE_S)
        start_s = time.perf_counter()
        probe = asyncio.create_task(_probe(aside, seen))
        calls: list[asyncio.Task[None]] = []
        for at_s in arrivals_s(rate_per_s, duration_s, seed=int(rate_per_s * 1000)):
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            calls.append(asyncio.create_task(_one(method, data, start_s, seen)))
        probe.cancel()
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.gather(*calls)
    return seen


async def _one(method: Any, data: bytes, start_s: float, seen: Seen) -> None:
    sent_s = time.perf_counter()
    call = method(data)
    first_s = 0.0
    num_messages = 0
    try:
        async for _ in call:
            num_messages += 1
            # The first says that it is taken in; the second has the first token.
            if num_messages == 2:
                first_s = time.perf_counter() - sent_s
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            seen.refused_s.append(time.perf_counter() - sent_s)
            seen.num_untold += _PUSHBACK not in dict(error.trailing_metadata() or ())
        else:
            name = error.code().name
            seen.others[name] = seen.others.get(name, 0) + 1
        return
    seen.served.append((time.perf_counter() - start_s, first_s))


async def _probe(channel: grpc.aio.Channel, seen: Seen) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    while True:
        begun_s = time.perf_counter()
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_S)
        seen.probe_s.append(time.perf_counter() - begun_s)
        seen.num_not_serving += answer.status != health_pb2.HealthCheckResponse.SERVING
        due_s = time.perf_counter() + _PROBE_EVERY_S
        await asyncio.sleep(_PROBE_EVERY_S)
        seen.lag_s.append(time.perf_counter() - due_s)
