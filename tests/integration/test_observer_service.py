"""Operators' calls to a real service: live requests, statistics, profiles, flight records, drains
and log levels.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from penstock.client import (
    FlightFormat,
    LogLevel,
    OperationsClient,
    PenstockError,
    RequestState,
    ServerProcess,
)
from penstock.server.observe.flight.reader import FlightReader
from support.calls import TracedCall
from support.generate_requests import greedy
from support.observation import ENDPOINT_OPTIONS, model_of, num_completed, observed, until_stats
from support.service import Service, Stream, launched, simulated
from support.timeout import TEST_TIMEOUT_S

FRONT = ("--fronts", "1")


async def fetched(url: str) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=TEST_TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body.decode()

    return await asyncio.to_thread(fetch)


Site = tuple[Service, OperationsClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Provide a service that runs one request at a time, for tests that leave it idle."""
    options = (
        *("--flight-folder", str(tmp_path_factory.mktemp("flight"))),
        *("--max-num-seqs", "1", "--max-seq-len", "8192", "--flight-steps", "64"),
    )
    async with observed(*simulated(), *FRONT, *options) as site:
        yield site


shared = pytest.mark.asyncio(loop_scope="module")


@shared
async def test_ports_are_printed_after_the_ready_line(site: Site) -> None:
    service, _ = site
    await service.printed_address("metrics")
    assert [line.split(" on ")[0] for line in service.stdout] == [
        "penstock ready",
        "penstock operations",
        "penstock metrics",
    ]


@shared
async def test_live_requests_are_seen_from_both_sides(site: Site) -> None:
    service, operations = site
    async with service.channel() as channel:
        running = Stream(channel, 4000)
        await running.until_running()
        waiting = Stream(channel, 4000, 9)
        await waiting.until_accepted()
        # It may be accepted before its engine has received it.
        await until_stats(
            operations,
            lambda stats: (model_of(stats).num_processing, model_of(stats).num_pending) == (1, 1),
        )
        first, second = await operations.list_requests()
        assert (first.state, second.state) == (RequestState.PROCESSING, RequestState.PENDING)
        assert first.num_blocks > 0, "known to the engine alone"
        assert first.history, "known to the front alone"
        assert second.queue_position == 0
        assert (await operations.get_request(second.request_id)).arrival_s == second.arrival_s
    # The channel is closed, and no request is left.
    await until_stats(
        operations,
        lambda stats: (model_of(stats).num_processing, model_of(stats).num_pending) == (0, 0),
    )


@shared
async def test_a_profile_of_each_process_is_a_speedscope_file(site: Site) -> None:
    _, operations = site
    # The batch size is known once the observer is connected to the engine.
    stats = await until_stats(
        operations, lambda stats: len(stats.fronts) == 1 and model_of(stats).max_num_seqs == 1
    )
    for process in ServerProcess:
        index = stats.fronts[0].index if process is ServerProcess.FRONT else None
        file = await operations.profile(process, front_index=index, duration_s=0.3)
        document = json.loads(file)
        assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
        names = [profile["name"] for profile in document["profiles"]]
        assert any(name.endswith("MainThread") for name in names)
        assert {frame["file"] for frame in document["shared"]["frames"]}
    with pytest.raises(PenstockError, match="there is no front 77"):
        await operations.profile(ServerProcess.FRONT, front_index=77, duration_s=0.1)


@shared
async def test_a_flight_record_is_returned_and_written_to_a_file(site: Site) -> None:
    service, operations = site
    before = FlightReader(await operations.get_flight_record(file_format=FlightFormat.RAW))
    num_before = before.recording().totals["num_output_tokens"]
    async with service.channel() as channel:
        assert await Stream(channel, 9).outcome() is grpc.StatusCode.OK
    copy = FlightReader(await operations.get_flight_record(file_format=FlightFormat.RAW))
    assert copy.recording().totals["num_output_tokens"] == num_before + 9
    path = Path(await operations.dump_flight_record())
    assert FlightReader(path).recording().totals == copy.recording().totals


async def test_metrics_and_stats_contain_what_was_served() -> None:
    named = ("--tenant-metadata-key", "x-tenant", "--metrics-tenants", "atlas,borealis")
    async with (
        observed(*simulated(), *FRONT, *named) as (service, operations),
        service.channel() as channel,
    ):
        done = [Stream(channel, 5, first) for first in range(4)]
        for one in done:
            assert await one.outcome() is grpc.StatusCode.OK
        # Requests and steps are reported by different processes.
        stats = await until_stats(
            operations,
            lambda stats: (
                num_completed(stats) == 4
                and model_of(stats).ttft.num_values == 4
                and model_of(stats).totals.num_completion_tokens >= 20
            ),
        )
        model = model_of(stats)
        assert model.totals.num_completion_tokens == 20
        assert model.totals.num_prompt_tokens == 16
        assert model.max_num_batched_tokens > 0
        assert model.cache.num_total_blocks == 512
        assert model.engine_epoch == 1
        metrics = await fetched(await service.printed_address("metrics"))
        assert "penstock_generation_tokens_total" in metrics
        processes = [
            line for line in metrics.splitlines() if line.startswith("penstock_process_resident")
        ]
        for name in ("engine", "front 1", "observer", "supervisor"):
            assert [line for line in processes if f'"{name}"' in line], (name, processes)

        for tenant in ("atlas", "nobody", "else"):
            call = TracedCall(channel, "Generate", greedy(), metadata=[("x-tenant", tenant)])
            assert await call.outcome() == "OK"
        # Counts and records arrive in different frames.
        await until_stats(
            operations,
            lambda stats: num_completed(stats) == 7 and model_of(stats).ttft.num_values == 7,
        )
        counts = requests_by_tenant(await fetched(await service.printed_address("metrics")))
        # Four requests named no tenant, and two named a tenant that is not listed.
        assert counts == {"atlas": 1, "borealis": 0, "other": 6, "nobody": 0}


def requests_by_tenant(metrics: str) -> dict[str, float]:
    return {
        tenant: sum(
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("penstock_tenant_requests_total") and f'tenant="{tenant}"' in line
        )
        for tenant in ("atlas", "borealis", "other", "nobody")
    }


async def test_an_operator_drains_the_service() -> None:
    arguments = [*simulated(), *FRONT, "--drain-timeout-s", "600"]
    async with observed(*arguments) as (service, operations), service.channel() as channel:
        running = Stream(channel, 900)
        await running.until_running()
        await until_stats(operations, lambda stats: stats.fronts[0].num_live_requests == 1)
        assert await operations.drain(timeout_s=0.2) == 1
        assert await running.outcome() is grpc.StatusCode.UNAVAILABLE
        assert await service.ended() == 0
        assert [line for line in service.stderr if "an operator: draining, at most 0.2 s" in line]


async def test_a_log_level_applies_to_all_current_and_later_processes() -> None:
    async with observed(*simulated(), *FRONT) as (service, operations):
        await operations.set_log_level(LogLevel.DEBUG)
        await service.until_logged("log level debug, by an operator")
        for process in ("engine", "front", "observer"):
            await service.until_logged(f"INFO {process}[", "log level is debug")
        os.kill(await service.next_pid("front"), signal.SIGKILL)
        await service.until_logged("DEBUG front[", "front id 2")


@pytest.mark.parametrize("option", ["operations-port", "metrics-port"])
async def test_a_port_that_is_taken_is_reported_by_its_option(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with launched(*simulated(), f"--{option}", str(port)) as service:
            assert await service.ended() == 2
            reported = [line for line in service.stderr if line.startswith("penstock serve: ")]
            assert reported == [
                f"penstock serve: --{option}: cannot listen on 127.0.0.1:{port}:"
                " Address already in use; 0 takes a free port\n"
            ]


@pytest.mark.parametrize("too_long", ["engine.sock", "observer.sock"])
async def test_a_temporary_folder_with_too_long_a_path_is_reported(
    too_long: str, tmp_path: Path
) -> None:
    # A Unix socket's path has 107 bytes at most: one more with the name of this socket.
    length = 108 - len(f"/penstock-12345678/{too_long}")
    folder = tmp_path / ("x" * (length - len(f"{tmp_path}/")))
    folder.mkdir()
    async with launched(
        *simulated(), *ENDPOINT_OPTIONS, environment={"TMPDIR": str(folder)}
    ) as service:
        assert await service.ended() == 2
        reported = [line for line in service.stderr if line.startswith("penstock serve: ")]
        assert len(reported) == 1
        assert f"/{too_long}: AF_UNIX path too long (TMPDIR chooses another folder)" in reported[0]
