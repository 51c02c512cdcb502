"""The TensorRT-LLM engine dies in each phase of a real service. Clients get the documented error,
and the service recovers.

The stand-in starts another process, as MPI does; none of these may remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from google.rpc import error_details_pb2, status_pb2
from support.fake_trtllm import child_environment
from support.service import Service, Stream, launched, until_health
from support.timeout import TEST_TIMEOUT_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = 400  # tokens, four seconds of them at least
RESPONSE_TIMEOUT_S = 3.0
"""Time without a response after which the engine counts as dead; long enough for a busy machine."""
PILL = 9
"""A prompt token that kills the engine."""
_lifetimes = itertools.count()


class Site:
    """A service, and a mark that identifies the processes of its engines."""

    def __init__(self, service: Service, lifetime_s: float) -> None:
        self.service = service
        self._mark = str(lifetime_s).encode()

    def workers(self) -> set[int]:
        """Return the pids of the live processes that engines of this service started."""
        found: set[int] = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    arguments = (entry / "cmdline").read_bytes().split(b"\0")
                    if self._mark in arguments:
                        found.add(int(entry.name))
        return found

    def engine_pid(self) -> int:
        """Return the pid of the engine process, ready or not."""
        pid = self.service.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (engine,) = [
            int(child)
            for child in children
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return engine


@contextlib.asynccontextmanager
async def serving(
    *arguments: str, watch: dict[str, float] | None = None, max_replays: int = 0, **fake: Any
) -> AsyncGenerator[Site]:
    """Launch `penstock serve --executor trtllm`; check at the end that no process of an engine
    remains.
    """
    config = {
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "kv_cache_config": {"max_tokens": 8192, "tokens_per_block": 16},
        "watch": {"limits_timeout_s": TEST_TIMEOUT_S, **(watch or {})},
    }
    lifetime_s = 600.0 + os.getpid() / 1e7 + next(_lifetimes) / 1e9
    environment = child_environment(
        **{
            "step_s": 0.01,
            "worker_process": True,
            "worker_lifetime_s": lifetime_s,
            **fake,
        }
    )
    options = ["--executor", "trtllm", "--trtllm-config", json.dumps(config), *arguments]
    options += ["--max-replays", str(max_replays)]
    async with launched(*options, environment=environment) as service:
        site = Site(service, lifetime_s)
        yield site
    assert site.workers() == set()


def reason_in(metadata: Any) -> str:
    """Return the ErrorInfo reason in the trailing metadata of a failed call; "" without one."""
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
    return ""


async def check_lost(*streams: Stream) -> None:
    for one in streams:
        assert await one.outcome() is grpc.StatusCode.UNAVAILABLE
        assert not one.has_finished
        assert reason_in(await one._call.trailing_metadata()) == "ENGINE_DOWN"


async def check_serves(site: Site, channel: grpc.aio.Channel) -> None:
    await until_health(channel, SERVING)
    assert await Stream(channel, 5).outcome() is grpc.StatusCode.OK
    assert len(site.workers()) == 1
    site.service.signal(signal.SIGTERM)
    assert await site.service.ended() == 0


@contextlib.asynccontextmanager
async def running_streams(
    site: Site, num_streams: int = 4
) -> AsyncGenerator[tuple[grpc.aio.Channel, list[Stream]]]:
    """Provide a channel to a ready service, and streams on it that have their first tokens."""
    await site.service.until_ready()
    await site.service.next_pid("engine")
    async with site.service.channel() as channel:
        streams = [Stream(channel, LONG, 100 + first) for first in range(num_streams)]
        await asyncio.gather(*(one.until_running() for one in streams))
        yield channel, streams


# Load


async def until_loading(site: Site) -> int:
    """Wait for an engine process whose executor has created its event loop but not loaded the model
    yet; return the process's pid.
    """

    def found() -> int | None:
        with contextlib.suppress(OSError, ValueError):
            pid = site.engine_pid()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if "eventpoll" in str(descriptor.readlink()):
                    return pid
        return None

    async with asyncio.timeout(TEST_TIMEOUT_S):
        while True:
            pid = await asyncio.to_thread(found)
            if pid is not None:
                return pid


async def test_a_failed_build_is_reported_in_one_line() -> None:
    async with serving(build_error="CUDA out of memory") as site:
        assert await site.service.ended() == 2
        assert "CUDA out of memory" in site.service.stderr[-1]
        assert not any("Traceback" in line for line in site.service.stderr)


async def test_a_later_load_that_is_killed_is_retried() -> None:
    async with serving(load_s=0.5) as site, running_streams(site) as (channel, streams):
        os.kill(site.engine_pid(), signal.SIGKILL)
        await check_lost(*streams)
        await site.service.until_logged("engine died (killed by signal 9)")
        loading = await until_loading(site)
        os.kill(loading, signal.SIGKILL)
        assert await site.service.next_pid("engine") != loading
        await check_serves(site, channel)


# Limits


async def test_an_engine_that_dies_while_reporting_its_limits_ends_a_first_start() -> None:
    async with serving(fatal_at=1) as site:
        assert await site.service.ended() == 2
        assert "the executor failed" in site.service.stderr[-1]
        assert site.workers() == set()


async def test_an_engine_without_limits_ends_a_first_start() -> None:
    async with serving(kill_loop_at=1, watch={"limits_timeout_s": 0.3}) as site:
        assert await site.service.ended() == 2
        assert "reported no limits" in site.service.stderr[-1]
        assert site.workers() == set()


# Prefill


@pytest.mark.parametrize("fault", ["fatal_token", "kill_loop_token", "hang_token"])
async def test_a_prompt_that_kills_the_engine_ends_all_requests_once(fault: str) -> None:
    watch = {"response_timeout_s": RESPONSE_TIMEOUT_S}
    async with (
        serving(watch=watch, **{fault: PILL}) as site,
        running_streams(site) as (channel, streams),
    ):
        (worker,) = site.workers()
        pill = Stream(channel, 5, PILL)
        await check_lost(pill, *streams)
        assert pill.num_tokens == 0
        await site.service.until_logged("the executor failed")
        await site.service.next_pid("engine")
        assert worker not in site.workers()
        await check_serves(site, channel)


# Decode


async def test_greedy_requests_of_a_killed_engine_continue_in_the_next() -> None:
    async with serving(max_replays=1) as site:
        await site.service.until_ready()
        await site.service.next_pid("engine")
        async with site.service.channel() as channel:
            streams = [Stream(channel, 80, 100 + first) for first in range(4)]
            await asyncio.gather(*(one.until_running() for one in streams))
            os.kill(site.engine_pid(), signal.SIGKILL)
            for one in streams:
                assert await one.outcome() is grpc.StatusCode.OK
                assert one.num_tokens == 80
            await site.service.next_pid("engine")


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_killed_worker_counts_as_the_engines_death(is_reported: bool) -> None:
    async with (
        serving(
            "--log-exception-messages",
            "on",
            watch={"response_timeout_s": RESPONSE_TIMEOUT_S},
            is_worker_death_fatal=is_reported,
        ) as site,
        running_streams(site) as (channel, streams),
    ):
        (worker,) = site.workers()
        os.kill(worker, signal.SIGKILL)
        await check_lost(*streams)
        message = "the executor failed" if is_reported else "returned nothing for"
        await site.service.until_logged(message)
        await site.service.next_pid("engine")
        await check_serves(site, channel)


async def test_an_idle_engine_that_dies_is_replaced_without_any_request() -> None:
    async with serving(is_death_seen_by_health=True) as site:
        await site.service.until_ready()
        first = await site.service.next_pid("engine")
        (worker,) = site.workers()
        async with site.service.channel() as channel:
            os.kill(worker, signal.SIGKILL)
            await site.service.until_logged("not healthy")
            assert await site.service.next_pid("engine") != first
            await check_serves(site, channel)


async def test_a_failed_request_does_not_affect_others() -> None:
    async with serving(fail_tokens=[PILL]) as site, running_streams(site) as (channel, streams):
        bad = Stream(channel, 5, PILL)
        assert await bad.outcome() is grpc.StatusCode.INTERNAL
        assert reason_in(await bad._call.trailing_metadata()) == "EXECUTOR_REQUEST_FAILED"
        assert {await one.outcome() for one in streams} == {grpc.StatusCode.OK}
        await check_serves(site, channel)


# Drain and shutdown


async def test_an_engine_that_dies_while_draining_ends_its_streams_and_the_drain_completes() -> (
    None
):
    async with serving() as site, running_streams(site) as (_, streams):
        site.service.signal(signal.SIGTERM)
        await site.service.until_logged("SIGTERM: draining")
        os.kill(site.engine_pid(), signal.SIGKILL)
        await check_lost(*streams)
        assert await site.service.ended() == 0


async def test_a_hung_engine_shutdown_does_not_block_the_service() -> None:
    watch = {"shutdown_timeout_s": 0.3}
    async with serving(watch=watch, shutdown_s=TEST_TIMEOUT_S) as site:
        async with running_streams(site) as (_, streams):
            site.service.signal(signal.SIGTERM)
            assert {await one.outcome() for one in streams} == {grpc.StatusCode.OK}
            assert await site.service.ended() == 0
        assert [line for line in site.service.stderr if "did not shut down in 0.3 s" in line]


async def test_an_engine_gets_its_configured_shutdown_time() -> None:
    # A shutdown of 4 s takes longer than the drain timeout, but less than its own limit.
    watch = {"shutdown_timeout_s": 20.0}
    async with serving("--drain-timeout-s", "0.5", watch=watch, shutdown_s=4.0) as site:
        await site.service.until_ready()
        site.service.signal(signal.SIGTERM)
        assert await site.service.ended() == 0
        assert not [line for line in site.service.stderr if "did not" in line]


async def test_a_fatal_error_with_a_hung_shutdown_is_detected_by_the_response_timeout() -> None:
    watch = {"response_timeout_s": RESPONSE_TIMEOUT_S}
    async with (
        serving(watch=watch, fatal_token=PILL, shutdown_s=TEST_TIMEOUT_S) as site,
        running_streams(site) as (channel, streams),
    ):
        pill = Stream(channel, 5, PILL)
        await check_lost(pill, *streams)
        await site.service.until_logged("returned nothing for")
        await site.service.next_pid("engine")
        await until_health(channel, SERVING)
        assert await Stream(channel, 5).outcome() is grpc.StatusCode.OK
