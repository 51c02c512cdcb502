"""Streams are not affected when the observer dies, is stopped or hangs; the last steps of a killed
engine are written to a file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest

from penstock.server.observe.flight.reader import FlightReader
from support.observation import (
    ENDPOINT_OPTIONS,
    flight_files,
    logged_path,
    model_of,
    num_completed,
    observed,
    until_stats,
)
from support.otlp_receiver import Mode, grpc_receiver
from support.service import Stream, simulated, started

NUM_STREAMS = 16


async def test_a_killed_observer_does_not_affect_streams_and_the_next_one_receives_them() -> None:
    async with observed(*simulated(), "--fronts", "2") as (service, operations):
        observer = await service.next_pid("observer")
        async with service.channel() as channel:
            before = Stream(channel, 3)
            assert await before.outcome() is grpc.StatusCode.OK
            await until_stats(operations, lambda stats: num_completed(stats) == 1)
            # None ends before the observer, however busy the machine is.
            running = [Stream(channel, 600, first) for first in range(NUM_STREAMS)]
            await asyncio.gather(*(one.until_running() for one in running))
            os.kill(observer, signal.SIGKILL)
            outcomes = await asyncio.gather(*(one.outcome() for one in running))
            assert outcomes == [grpc.StatusCode.OK] * NUM_STREAMS
            assert await service.next_pid("observer") != observer
        stats = await until_stats(
            operations,
            lambda stats: (
                num_completed(stats) == NUM_STREAMS + 1
                and model_of(stats).ttft.num_values == NUM_STREAMS
            ),
        )
        assert len(stats.fronts) == 2
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_a_stopped_observer_blocks_no_front_and_receives_everything_later() -> None:
    async with observed(*simulated(), "--fronts", "1") as (service, operations):
        observer = await service.next_pid("observer")
        os.kill(observer, signal.SIGSTOP)
        async with service.channel() as channel:
            for _ in range(3):
                running = [Stream(channel, 20, first) for first in range(NUM_STREAMS)]
                outcomes = await asyncio.gather(*(one.outcome() for one in running))
                assert outcomes == [grpc.StatusCode.OK] * NUM_STREAMS
        os.kill(observer, signal.SIGCONT)
        await until_stats(operations, lambda stats: num_completed(stats) == 3 * NUM_STREAMS)


async def test_a_service_continues_when_its_observer_keeps_dying() -> None:
    async with started(*simulated(), "--fronts", "1", *ENDPOINT_OPTIONS) as service:
        for _ in range(5):
            os.kill(await service.next_pid("observer"), signal.SIGKILL)
        await service.until_logged(
            "observer died 5 times in 60 s: the service continues without it"
        )
        async with service.channel() as channel:
            assert await Stream(channel, 3).outcome() is grpc.StatusCode.OK
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


@pytest.mark.parametrize("drain_timeout_s", ["0.2", "60"])
async def test_an_observer_that_does_not_exit_is_killed(drain_timeout_s: str) -> None:
    arguments = [
        *simulated(),
        "--fronts",
        "1",
        "--drain-timeout-s",
        drain_timeout_s,
        *ENDPOINT_OPTIONS,
    ]
    async with started(*arguments) as service:
        os.kill(await service.next_pid("observer"), signal.SIGSTOP)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert [line for line in service.stderr if "the observer did not end in time" in line]


async def test_a_hung_collector_delays_neither_streams_nor_shutdown() -> None:
    with grpc_receiver(Mode.HANGING) as collector:
        arguments = [*simulated(), "--otlp-endpoint", collector.endpoint, "--fronts", "1"]
        async with observed(*arguments) as (service, operations):
            async with service.channel() as channel:
                running = [Stream(channel, 5, first) for first in range(NUM_STREAMS)]
                outcomes = await asyncio.gather(*(one.outcome() for one in running))
                assert outcomes == [grpc.StatusCode.OK] * NUM_STREAMS
            await until_stats(operations, lambda stats: num_completed(stats) == NUM_STREAMS)
            service.signal(signal.SIGTERM)
            assert await service.ended() == 0
            assert not [line for line in service.stderr if "did not end in time" in line]


async def test_the_last_steps_of_a_killed_engine_are_written_to_a_file(tmp_path: Path) -> None:
    # Without an observer: the recorder is always on.
    options = ("--flight-folder", str(tmp_path), "--max-replays", "0")
    async with started(*simulated(), *options) as service:
        engine = await service.next_pid("engine")
        async with service.channel() as channel:
            running = [Stream(channel, 900, first) for first in range(3)]
            await asyncio.gather(*(one.until_running() for one in running))
            os.kill(engine, signal.SIGKILL)
            for one in running:
                assert await one.outcome() is grpc.StatusCode.UNAVAILABLE
        path = await logged_path(service, "flight record (engine died)")
        assert flight_files(tmp_path) == [path]
        recording = FlightReader(path).recording()
        assert recording.facts.epoch == 1
        assert len(recording.requests) == 3
        assert recording.steps["num_running"].max() == 3
        await service.next_pid("engine")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert flight_files(tmp_path) == [path], "an engine that was told to end leaves nothing"


async def test_sigusr1_writes_the_flight_record_and_interrupts_nothing(
    tmp_path: Path,
) -> None:
    async with started(*simulated(), "--flight-folder", str(tmp_path)) as service:
        async with service.channel() as channel:
            assert await Stream(channel, 7).outcome() is grpc.StatusCode.OK
        service.signal(signal.SIGUSR1)
        path = await logged_path(service, "flight record (requested)")
        recording = FlightReader(path).recording()
        assert recording.totals["num_output_tokens"] == 7
        service.signal(signal.SIGUSR1)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert len(flight_files(tmp_path)) == 2
