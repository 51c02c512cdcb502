"""Cases 20 to 23: the service is stopped at unfavourable moments, and still drains within its time
limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2

from support.service import Stream, health_watch, simulated, started, until_gone, until_health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = 900  # tokens, about nine seconds of them
FOR_EVER_S = "600"


async def test_case_20_a_drain_with_requests_that_run_and_that_wait() -> None:
    arguments = [*simulated(), "--max-num-seqs", "32", "--drain-timeout-s", FOR_EVER_S]
    async with started(*arguments) as service:
        async with service.channel() as channel:
            running = [Stream(channel, 120, first) for first in range(32)]
            await asyncio.gather(*(one.until_running() for one in running))
            waiting = [Stream(channel, 20, first) for first in range(32, 64)]
            await asyncio.gather(*(one.until_accepted() for one in waiting))
            service.signal(signal.SIGTERM)
            await until_health(channel, NOT_SERVING)
            assert await Stream(channel, 1).outcome() is grpc.StatusCode.UNAVAILABLE
            outcomes = await asyncio.gather(*(one.outcome() for one in (*running, *waiting)))
            assert outcomes == [grpc.StatusCode.OK] * 64
            assert [one.num_tokens for one in running] == [120] * 32
            assert [one.num_tokens for one in waiting] == [20] * 32
        assert await service.ended() == 0


async def test_case_21_a_stream_longer_than_the_drain_timeout() -> None:
    async with started(*simulated(), "--drain-timeout-s", "0.3") as service:
        async with service.channel() as channel:
            long = Stream(channel, LONG)
            await long.until_running()
            service.signal(signal.SIGTERM)
            assert await long.outcome() is grpc.StatusCode.UNAVAILABLE
            assert not long.has_finished
            assert 0 < long.num_tokens < LONG
        assert await service.ended() == 0
        # The engine's accounting was checked before it ended.
        assert not [line for line in service.stderr if "integrity check failed" in line]


async def test_case_22_an_open_health_watch_and_a_dead_collector_do_not_block_a_drain() -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:  # takes connections, never answers
        arguments = [
            *simulated(),
            *("--drain-timeout-s", FOR_EVER_S),
            *("--otlp-endpoint", f"http://127.0.0.1:{collector.getsockname()[1]}"),
        ]
        async with started(*arguments) as service, service.channel() as channel:
            watch = health_watch(channel)
            assert (await watch.read()).status == SERVING
            assert await Stream(channel, 3).outcome() is grpc.StatusCode.OK
            service.signal(signal.SIGTERM)
            assert await service.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_case_23_a_second_signal_ends_the_service_at_once(number: signal.Signals) -> None:
    arguments = [*simulated(), "--drain-timeout-s", FOR_EVER_S]
    async with started(*arguments) as service, service.channel() as channel:
        children = [await service.next_pid(role) for role in ("engine", "front")]
        long = Stream(channel, LONG)
        await long.until_running()
        service.signal(signal.SIGTERM)
        await service.until_logged("draining")
        service.signal(number)
        assert await long.outcome() is grpc.StatusCode.UNAVAILABLE
        assert await service.ended() == 128 + number
        for pid in children:
            await until_gone(pid)


async def test_a_drain_waits_for_the_engine_that_its_requests_wait_for() -> None:
    arguments = [*simulated(), "--drain-timeout-s", FOR_EVER_S]
    async with started(*arguments) as service, service.channel() as channel:
        engine = await service.next_pid("engine")
        running = [Stream(channel, 200, first) for first in range(4)]
        await asyncio.gather(*(one.until_running() for one in running))
        os.kill(engine, signal.SIGKILL)
        await service.until_logged("the engine is lost")
        service.signal(signal.SIGTERM)
        outcomes = await asyncio.gather(*(one.outcome() for one in running))
        assert outcomes == [grpc.StatusCode.OK] * 4
        assert [one.num_tokens for one in running] == [200] * 4
        assert await service.ended() == 0


async def test_a_drain_does_not_wait_for_an_engine_without_waiting_requests() -> None:
    arguments = [*simulated(), "--drain-timeout-s", FOR_EVER_S]
    async with started(*arguments) as service:
        os.kill(await service.next_pid("engine"), signal.SIGKILL)
        await service.until_logged("engine died")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_a_front_that_dies_as_the_drain_begins_does_not_fail_the_drain() -> None:
    arguments = [*simulated(), "--fronts", "2", "--drain-timeout-s", FOR_EVER_S]
    async with started(*arguments) as service:
        front = await service.next_pid("front")
        os.kill(front, signal.SIGKILL)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
