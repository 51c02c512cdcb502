"""Cases 24 to 27: which streams are lost and which processes are restarted when the engine, fronts
or the supervisor die or hang.

No process is left behind, and no stream hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from support.service import Stream, health_of, simulated, started, until_gone, until_health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = 900  # tokens, about nine seconds of them
NO_REPLAY = ("--max-replays", "0")
OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_case_24_without_replay_every_stream_ends_when_the_engine_is_killed() -> None:
    arguments = [*simulated(), "--fronts", "2", "--max-replays", "0"]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await service.next_pids(2)
        running = [Stream(channel, LONG, first) for first in range(64)]
        await asyncio.gather(*(one.until_running() for one in running))
        gone = asyncio.create_task(until_health(channel, NOT_SERVING))
        os.kill(engine, signal.SIGKILL)
        outcomes = await asyncio.gather(*(one.outcome() for one in running))
        assert outcomes == [UNAVAILABLE] * 64
        assert not any(one.has_finished for one in running)
        await gone
        assert await service.next_pid("engine") != engine
        await until_health(channel, SERVING)
        assert await Stream(channel, 7).outcome() is OK
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_case_25_a_stopped_engine_is_detected_killed_and_replaced() -> None:
    arguments = [*simulated(), "--engine-hang-s", "5"]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await service.next_pids(1)
        running = [Stream(channel, 150, first) for first in range(8)]
        await asyncio.gather(*(one.until_running() for one in running))
        os.kill(engine, signal.SIGSTOP)
        await service.until_logged("no heartbeat of the engine for 5 s: killing it")
        await until_gone(engine)
        assert await service.next_pid("engine") != engine
        outcomes = await asyncio.gather(*(one.outcome() for one in running))
        assert outcomes == [OK] * 8
        assert [one.num_tokens for one in running] == [150] * 8


async def test_case_25_an_engine_that_hangs_in_a_step_is_detected() -> None:
    fault = {"kind": "hang", "at_step": 40}
    arguments = [*simulated(faults=[fault]), "--engine-hang-s", "5", "--max-replays", "0"]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await service.next_pids(1)
        assert await Stream(channel, LONG).outcome() is UNAVAILABLE
        await until_gone(engine)
        assert await service.next_pid("engine") != engine


async def test_a_hung_front_is_killed_and_replaced() -> None:
    arguments = [*simulated(), "--fronts", "2", "--front-hang-s", "5"]
    async with started(*arguments) as service:
        _, fronts = await service.next_pids(2)
        os.kill(fronts[0], signal.SIGSTOP)
        await service.until_logged("for 5 s: killing it")
        await until_gone(fronts[0])
        assert await service.next_pid("front") not in fronts
        channels = [service.channel() for _ in range(8)]
        outcomes = await asyncio.gather(*(Stream(channel, 3).outcome() for channel in channels))
        assert outcomes == [OK] * 8
        await asyncio.gather(*(channel.close() for channel in channels))


async def test_case_26_repeated_engine_deaths_end_the_service_and_every_stream() -> None:
    # The engine dies at its step 30 with any requests: none is responsible.
    fault = {"kind": "process_exits", "at_step": 30, "exit_code": 9}
    arguments = [*simulated(faults=[fault]), "--max-replays", "16", "--fronts", "2"]
    async with started(*arguments) as service:
        channels = [service.channel() for _ in range(4)]
        running = [
            Stream(channel, LONG, first) for first, channel in enumerate((*channels, *channels))
        ]
        outcomes = await asyncio.gather(*(one.outcome() for one in running))
        assert set(outcomes) <= {UNAVAILABLE, grpc.StatusCode.INTERNAL}
        assert UNAVAILABLE in outcomes
        assert await service.ended() == 1
        assert [line for line in service.stderr if "engine died 5 times in 60 s" in line]
        assert not [line for line in service.stderr if "did not shut down cleanly" in line]
        await asyncio.gather(*(channel.close() for channel in channels))


async def test_case_27_a_killed_front_ends_its_streams_and_leaves_the_engine_clean() -> None:
    async with started(*simulated(), "--fronts", "1") as service:
        engine, fronts = await service.next_pids(1)
        async with service.channel() as channel:
            running = [Stream(channel, LONG, first) for first in range(16)]
            await asyncio.gather(*(one.until_running() for one in running))
            os.kill(fronts[0], signal.SIGKILL)
            outcomes = await asyncio.gather(*(one.outcome() for one in running))
            assert outcomes == [UNAVAILABLE] * 16
        await service.until_logged("front 1 is lost, cancelled requests: 16")
        assert await service.next_pid("front") not in fronts
        async with service.channel() as channel:
            assert await health_of(channel) == SERVING
            assert await Stream(channel, 5).outcome() is OK
        # The engine is still the first one, and its accounting is correct.
        os.kill(engine, 0)
        assert not [line for line in service.stderr if "integrity check failed" in line]
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_waiting_requests_end_too_when_the_engine_is_killed() -> None:
    arguments = [*simulated(), "--max-num-seqs", "1", *NO_REPLAY]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await service.next_pids(1)
        running = Stream(channel, LONG)
        await running.until_running()
        waiting = Stream(channel, LONG)
        await waiting.until_accepted()
        os.kill(engine, signal.SIGKILL)
        assert await running.outcome() is UNAVAILABLE
        assert await waiting.outcome() is UNAVAILABLE


async def test_with_replay_running_and_waiting_requests_continue() -> None:
    arguments = [*simulated(), "--max-num-seqs", "1"]
    async with started(*arguments) as service, service.channel() as channel:
        engine, _ = await service.next_pids(1)
        running = Stream(channel, 100)
        await running.until_running()
        waiting = Stream(channel, 20)
        await waiting.until_accepted()
        os.kill(engine, signal.SIGKILL)
        outcomes = await asyncio.gather(running.outcome(), waiting.outcome())
        assert list(outcomes) == [OK] * 2
        assert (running.num_tokens, waiting.num_tokens) == (100, 20)


async def test_an_executor_that_dies_by_itself_is_replaced() -> None:
    fault = {"kind": "executor_dies", "at_output": 5}
    arguments = [*simulated(faults=[fault]), *NO_REPLAY]
    async with started(*arguments) as service, service.channel() as channel:
        await service.next_pids(1)
        assert await Stream(channel, 50).outcome() is UNAVAILABLE
        await service.until_logged("the executor failed")
        await service.next_pid("engine")
        await until_health(channel, SERVING)
        assert await Stream(channel, 3).outcome() is OK


async def test_a_killed_front_ends_only_its_own_streams() -> None:
    async with started(*simulated(), "--fronts", "2") as service:
        _, fronts = await service.next_pids(2)
        # Connections spread over the fronts by their port numbers: with sixteen, each has some.
        channels = [service.channel() for _ in range(16)]
        running = [Stream(channel, LONG) for channel in channels]
        await asyncio.gather(*(one.until_running() for one in running))
        os.kill(fronts[0], signal.SIGKILL)
        outcomes = await asyncio.gather(*(one.outcome() for one in running))
        num_lost = outcomes.count(UNAVAILABLE)
        assert 0 < num_lost < 16
        assert outcomes.count(OK) == 16 - num_lost

        # The engine forgets the dead front's requests; another front takes its place.
        await service.until_logged(f"is lost, cancelled requests: {num_lost}")
        assert await service.next_pid("front") not in fronts
        again = [Stream(channel, 3) for channel in channels]
        outcomes = await asyncio.gather(*(one.outcome() for one in again))
        assert outcomes == [OK] * 16
        await asyncio.gather(*(channel.close() for channel in channels))
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


def is_folder(path: Path) -> bool:
    return path.is_dir()


async def test_case_27_no_process_outlives_a_killed_supervisor() -> None:
    async with started(*simulated(), "--fronts", "2") as service, service.channel() as channel:
        engine, fronts = await service.next_pids(2)
        running = Stream(channel, LONG)
        await running.until_running()
        folder = Path(
            (await service.until_logged(" socket=")).rpartition(" socket=")[2].strip()
        ).parent
        assert is_folder(folder)
        service.signal(signal.SIGKILL)
        assert await running.outcome() is UNAVAILABLE
        for pid in (engine, *fronts):
            await until_gone(pid)
        assert await service.ended() == -signal.SIGKILL
        assert not is_folder(folder)
