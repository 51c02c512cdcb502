"""Processes are killed: no process is orphaned, no stream hangs, the service recovers."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from support.service import (
    Service,
    health_of,
    simulated,
    started,
    stream,
    until_gone,
    until_health,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = 900  # tokens, about nine seconds of them
NO_REPLAY = ("--max-replays", "0")


async def pids_of(service: Service, num_fronts: int) -> tuple[int, list[int]]:
    engine = await service.next_pid("engine")
    return engine, [await service.next_pid("front") for _ in range(num_fronts)]


async def test_waiting_requests_end_too_when_the_engine_is_killed() -> None:
    arguments = [*simulated(), "--max-num-seqs", "1", *NO_REPLAY]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await pids_of(service, 1)
        running = stream(channel, LONG)
        await running.until_running()
        waiting = stream(channel, LONG)
        await waiting.until_accepted()
        os.kill(engine, signal.SIGKILL)
        assert await running.outcome() is grpc.StatusCode.UNAVAILABLE
        assert await waiting.outcome() is grpc.StatusCode.UNAVAILABLE


async def test_with_replay_those_who_run_and_those_who_wait_go_on() -> None:
    arguments = [*simulated(), "--max-num-seqs", "1"]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await pids_of(service, 1)
        running = stream(channel, 100)
        await running.until_running()
        waiting = stream(channel, 20)
        await waiting.until_accepted()
        os.kill(engine, signal.SIGKILL)
        outcomes = await asyncio.gather(running.outcome(), waiting.outcome())
        assert list(outcomes) == [grpc.StatusCode.OK] * 2
        assert (running.num_tokens, waiting.num_tokens) == (100, 20)


async def test_an_executor_that_dies_by_itself_is_followed_by_another() -> None:
    fault = {"kind": "executor_dies", "at_output": 5}
    arguments = [*simulated(faults=[fault]), *NO_REPLAY]
    async with started(*arguments) as service, service.channel() as channel:
        await pids_of(service, 1)
        assert await stream(channel, 50).outcome() is grpc.StatusCode.UNAVAILABLE
        await service.until_logged("the executor failed")
        await service.next_pid("engine")
        await until_health(channel, SERVING)
        assert await stream(channel, 3).outcome() is grpc.StatusCode.OK


async def test_health_says_so_while_there_is_no_engine() -> None:
    async with started(*simulated()) as service, service.channel() as channel:
        engine, _ = await pids_of(service, 1)
        assert await health_of(channel) == SERVING
        gone = asyncio.create_task(until_health(channel, NOT_SERVING))
        os.kill(engine, signal.SIGKILL)
        await gone
        await until_health(channel, SERVING)


async def test_a_killed_front_takes_only_its_own_streams_along() -> None:
    async with started(*simulated(), "--fronts", "2") as service:
        _, fronts = await pids_of(service, 2)
        # Connections spread over the fronts by their port numbers: with sixteen, each has some.
        channels = [service.channel() for _ in range(16)]
        running = [stream(channel, 400) for channel in channels]
        await asyncio.gather(*(one.until_running() for one in running))
        os.kill(fronts[0], signal.SIGKILL)
        outcomes = await asyncio.gather(*(one.outcome() for one in running))
        num_lost = outcomes.count(grpc.StatusCode.UNAVAILABLE)
        assert 0 < num_lost < 16
        assert outcomes.count(grpc.StatusCode.OK) == 16 - num_lost

        # The engine forgets the dead front's requests; another front takes its place.
        await service.until_logged(f"is lost, its {num_lost} requests are cancelled")
        assert await service.next_pid("front") not in fronts
        again = [stream(channel, 3) for channel in channels]
        outcomes = await asyncio.gather(*(one.outcome() for one in again))
        assert outcomes == [grpc.StatusCode.OK] * 16
        await asyncio.gather(*(channel.close() for channel in channels))
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


def is_folder(path: Path) -> bool:
    return path.is_dir()


async def test_case_27_nothing_outlives_a_killed_supervisor() -> None:
    async with started(*simulated(), "--fronts", "2") as service, service.channel() as channel:
        engine, fronts = await pids_of(service, 2)
        running = stream(channel, LONG)
        await running.until_running()
        folder = Path((await service.until_logged(" link=")).rpartition(" link=")[2].strip()).parent
        assert is_folder(folder)
        service.signal(signal.SIGKILL)
        assert await running.outcome() is grpc.StatusCode.UNAVAILABLE
        for pid in (engine, *fronts):
            await until_gone(pid)
        assert await service.ended() == -signal.SIGKILL
        assert not is_folder(folder)
