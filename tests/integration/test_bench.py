"""Runs `penstock bench` as a process against real services, scripted services and no service, and
checks its output, files and exit codes.
"""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from support.cli_process import Result, Terminal, ended, run, running
from support.scripted_server import ScriptedServer, ServedCall, error_info, scripted_server
from support.service import Service, simulated
from support.service import started as service_started
from support.timeout import TEST_TIMEOUT_S

SHORT = ("--warm-up-s", "0", "--prompt-tokens", "8", "--output-tokens", "3")
_TWINS = {"prompt_tokens": 40, "output_tokens": 2, "prefix_ids": [5], "prefix_block_tokens": 64}
TRACE = "\n".join(
    json.dumps(line)
    for line in (
        {"arrival_s": 0.0, **_TWINS},
        {"arrival_s": 0.1, **_TWINS},
        {"arrival_s": 0.2, "prompt_tokens": 9, "output_tokens": 7},
    )
)


async def bench(*arguments: object, **variables: str) -> Result:
    return await run("bench", *arguments, **variables)


def points_of(path: Path) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["points"]
    return points


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncGenerator[Service]:
    async with service_started(*simulated()) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sweep_over_a_real_service(service: Service, tmp_path: Path) -> None:
    done = await bench(
        *(service.address, *SHORT, "--rates", "40,80", "--processes", 2, "--requests", 20),
        *("--seed", 3, "--report", tmp_path / "out", "--json", tmp_path / "bench.json"),
    )

    assert done.code == 0, done.err
    rows = [line.split()[0] for line in done.out.splitlines()]
    assert rows[:3] == ["load", "40/s", "80/s"]
    assert f"report in {tmp_path / 'out'}" in done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "bench.html",
        "bench.json",
    ]
    points = points_of(tmp_path / "bench.json")
    assert points == points_of(tmp_path / "out" / "bench.json")
    for point in points:
        assert (point["num_due"], point["num_completed"], point["num_short"]) == (20, 20, 0)
        assert point["ttft"]["num"] == point["total"]["num"] == point["queue"]["num"] == 20
        # Three tokens have two gaps, or fewer if a message contained several tokens.
        assert 0 < point["itl"]["num"] <= 40
        assert len(point["cpu_shares"]) == 2
        assert point["cached_prompt_share"] == 0.0
        assert point["errors"] == []
    settings = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["settings"]
    assert settings["seed"] == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_a_closed_loop_and_a_replayed_trace(service: Service, tmp_path: Path) -> None:
    trace, reported = tmp_path / "trace.jsonl", tmp_path / "bench.json"
    trace.write_text(TRACE, encoding="utf-8")

    closed = await bench(
        *(service.address, *SHORT, "--warm-up-s", 0.1, "--concurrency", 5, "--requests", 12),
        *("--json", reported),
    )
    assert closed.code == 0, closed.err
    [point] = points_of(reported)
    # The requests of the warm-up do not count.
    assert (point["arrivals"], point["num_due"], point["num_completed"]) == ("closed", 12, 12)
    assert point["output_tokens_per_s"] * point["duration_s"] == pytest.approx(36)
    assert point["requests_per_s"] * point["duration_s"] == pytest.approx(12)
    assert point["offered_per_s"] is None

    replay = (service.address, "--trace", trace, "--warm-up-s", 0, "--seed", 1, "--json", reported)
    for _ in range(2):
        replayed = await bench(*replay)
        assert replayed.code == 0, replayed.err
        [point] = points_of(reported)
        assert (point["arrivals"], point["num_completed"], point["num_short"]) == ("replay", 3, 0)
    # The second replay has the same prompts, whose full blocks are cached.
    assert point["cached_prompt_share"] > 0.0


@pytest.mark.asyncio(loop_scope="module")
async def test_all_requests_of_a_connection_on_one_stream(service: Service, tmp_path: Path) -> None:
    done = await bench(
        *(service.address, *SHORT, "--concurrency", 6, "--requests", 12),
        *("--multiplex", "--channels", 2, "--json", tmp_path / "bench.json"),
    )

    assert done.code == 0, done.err
    [point] = points_of(tmp_path / "bench.json")
    assert (point["num_completed"], point["num_short"]) == (12, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_terminal_shows_the_progress_of_the_load(service: Service) -> None:
    terminal = Terminal()
    try:
        async with running(
            "bench", *(service.address, "--rates", "5", "--duration-s", 600), stderr=terminal.slave
        ) as process:
            await terminal.wait_for(b"/605 s warm-up: ")
            await terminal.wait_for(b" failed")
            process.send_signal(signal.SIGINT)
            assert (await ended(process)).code == 130
    finally:
        terminal.close()


async def test_a_separate_service(tmp_path: Path) -> None:
    done = await bench(
        *("--own-service", *SHORT, "--concurrency", 2, "--requests", 4),
        *("--json", tmp_path / "bench.json", "--", *simulated()),
    )

    assert done.code == 0, done.err
    assert points_of(tmp_path / "bench.json")[0]["num_completed"] == 4


async def test_a_separate_service_that_does_not_start() -> None:
    done = await bench("--own-service", "--rates", 1, "--", *simulated(), "--max-num-seqs", "0")

    assert done.code == 3
    assert "the service ended before it was ready" in done.err
    assert "Traceback" not in done.err


async def test_errors_are_counted_by_status_and_reason(tmp_path: Path) -> None:
    async def queue_full(call: ServedCall) -> None:
        await call.fail(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", error_info("QUEUE_FULL")
        )

    async def plain(call: ServedCall) -> None:
        await call.fail(grpc.StatusCode.UNAVAILABLE, "gone")

    async with scripted_server() as server:
        server.scripts.extend([queue_full, plain, queue_full, queue_full])
        done = await bench(
            *(server.address, *SHORT, "--concurrency", 1, "--requests", 6),
            *("--json", tmp_path / "bench.json"),
        )

    assert done.code == 0, done.err
    [point] = points_of(tmp_path / "bench.json")
    assert (point["num_due"], point["num_completed"], point["num_failed"]) == (6, 2, 4)
    assert point["errors"] == [
        {"status": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "num": 3},
        {"status": "UNAVAILABLE", "reason": "", "num": 1},
    ]
    assert "error        3 x RESOURCE_EXHAUSTED (QUEUE_FULL)" in done.out
    assert "66.7% of the requests failed" in done.err
    # The planned requests, without retries.
    assert len(server.requests) == 6
    request = server.requests[0].request
    assert len(request.token_prompt.ids) == 8
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (3, True)


async def test_no_completed_request_exits_with_code_1(tmp_path: Path) -> None:
    async def plain(call: ServedCall) -> None:
        await call.fail(grpc.StatusCode.INTERNAL, "broken")

    async with scripted_server() as server:
        server.scripts.extend([plain] * 3)
        done = await bench(server.address, *SHORT, "--concurrency", 1, "--requests", 3)

    assert done.code == 1
    assert "requests     3 due: 0 completed, 3 failed" in done.out


async def test_the_tenant_is_sent_with_every_call() -> None:
    async with scripted_server() as server:
        done = await bench(
            *(server.address, *SHORT, "--concurrency", 1, "--requests", 2),
            *("--tenant", "ada", "--tenant-metadata-key", "x-tenant"),
        )

    assert done.code == 0, done.err
    assert [call.metadata["x-tenant"] for call in server.requests] == ["ada", "ada"]


@pytest.mark.asyncio(loop_scope="module")
async def test_lengths_that_the_model_rejects_are_bad_usage(service: Service) -> None:
    done = await bench(service.address, "--rates", 1, "--prompt-tokens", 2**20)

    assert done.code == 2, done.err
    assert "a prompt may have" in done.err
    assert len(done.err.splitlines()) == 1


async def test_no_service_at_the_address_exits_with_code_3() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = await bench(f"127.0.0.1:{taken.getsockname()[1]}", "--rates", 1)

    assert done.code == 3
    assert "UNAVAILABLE" in done.err


def workers_of(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if any("spawn_main" in part for part in child.cmdline())]


@asynccontextmanager
async def under_load() -> AsyncGenerator[tuple[ScriptedServer, asyncio.subprocess.Process], None]:
    """Start a `penstock bench` with two worker processes on a server that never answers; provide
    both once the first four requests have arrived.
    """

    async def never(call: ServedCall) -> None:
        await call.cancelled.wait()

    async with scripted_server() as server:
        server.scripts.extend([never] * 1000)
        async with running(
            "bench", *(server.address, "--concurrency", 4, "--processes", 2, "--deadline-s", 1000)
        ) as process:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                for _ in range(4):
                    await server.arrived.get()
            yield server, process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_load_cancels_and_leaves_no_request(number: signal.Signals) -> None:
    async with under_load() as (server, process):
        workers = workers_of(process)
        assert len(workers) == 2

        process.send_signal(number)
        done = await ended(process)

        assert done.code == 128 + number
        assert done.err.splitlines() == ["penstock bench: interrupted"]
        assert not any(worker.is_running() for worker in workers)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            for call in server.requests:
                await call.cancelled.wait()


async def test_a_load_process_that_dies_is_reported() -> None:
    async with under_load() as (_, process):
        first, second = workers_of(process)

        first.kill()
        done = await ended(process)

        assert done.code == 1
        assert "of the load generator exited with exit code -9" in done.err
        assert "Traceback" not in done.err
        assert not second.is_running()


async def test_the_processes_of_a_load_do_not_outlive_it() -> None:
    async with under_load() as (_, process):
        workers = workers_of(process)

        process.kill()
        await ended(process)

        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, TEST_TIMEOUT_S)
        assert alive == []
