"""The metrics of a real service equal its clients' counts, however requests end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable

import grpc
import pytest

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.metric_samples import samples_of, total, value
from support.service import Service, Stream, simulated, started
from support.timeout import TEST_TIMEOUT_S

Samples = dict[tuple[str, frozenset[str]], float]
ARGUMENTS = ("--metrics-port", "0", "--fronts", "2", "--max-num-seqs", "4")


async def scraped_until(service: Service, is_seen: Callable[[Samples], bool]) -> Samples:
    """Scrape until `is_seen` accepts the samples; return the samples. Fronts report their counts
    once a second, so the first scrapes may be out of date.
    """
    url = await service.printed_address("metrics")
    samples: Samples = {}
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while not samples or not is_seen(samples):
            samples = samples_of((await asyncio.to_thread(fetched, url)).decode())
    return samples


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TEST_TIMEOUT_S) as answer:
        body: bytes = answer.read()
    return body


async def rejected(channel: grpc.aio.Channel) -> None:
    call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_end_is_counted_once() -> None:
    async with started(*simulated(), *ARGUMENTS) as service:
        channels = [service.channel() for _ in range(4)]
        done = [Stream(channels[index % 4], 6, index) for index in range(8)]
        for one in done:
            assert await one.outcome() is grpc.StatusCode.OK
        left = [Stream(channel, 900) for channel in channels[:2]]
        for one in left:
            await one.until_running()
            one._call.cancel()
        late = Stream(channels[3], 6)
        await late.until_accepted()
        await rejected(channels[0])
        assert await late.outcome() is grpc.StatusCode.OK

        samples = await scraped_until(service, lambda seen: total(seen, "requests_total") >= 12)

        assert total(samples, "requests_total") == 12
        assert total(samples, "request_duration_seconds_count") == 12
        assert value(samples, "request_duration_seconds_count", outcome="cancelled") == 2
        assert value(samples, "request_duration_seconds_count", outcome="ok") == 9
        assert value(samples, "request_errors_total", reason="INVALID_ARGUMENT") == 1
        assert value(samples, "time_to_first_token_seconds_count") == 11
        assert value(samples, "engine_up") == 1
        assert value(samples, "fronts") == 2
        assert value(samples, "max_requests_running") == 4
        assert value(samples, "kv_cache_total_blocks") == 512
        # A cancel may be detected a step later, and its metrics are read later still.
        await scraped_until(
            service,
            lambda seen: (
                value(seen, "num_requests_running") == 0
                and value(seen, "kv_cache_usage_ratio") == 0
                and value(seen, "generation_tokens_total") >= 9 * 6 + 2
            ),
        )
        for channel in channels:
            await channel.close()


async def test_requests_that_end_in_an_idle_engine_are_removed_from_its_gauges() -> None:
    arguments = (*simulated(step_s=0.05), *ARGUMENTS, "--max-num-seqs", "1")
    async with started(*arguments) as service, service.channel() as channel:
        running = Stream(channel, 900)
        await running.until_running()
        waiting = Stream(channel, 900)
        await waiting.until_accepted()
        samples = await scraped_until(
            service,
            lambda seen: (
                value(seen, "num_requests_running") == 1
                and value(seen, "num_requests_waiting") == 1
                and value(seen, "queue_head_waits", reason="slots") == 1
            ),
        )
        assert value(samples, "kv_cache_usage_ratio") > 0
        page = (await service.printed_address("metrics")).removesuffix("metrics") + "status.json"
        status = json.loads(await asyncio.to_thread(fetched, page))
        assert sorted(request["state"] for request in status["requests"]) == [
            "PENDING",
            "PROCESSING",
        ]
        assert {request["num_prompt_tokens"] for request in status["requests"]} == {4}
        assert status["num_requests"] == 2

        # No remaining request makes the engine take another step.
        waiting._call.cancel()
        running._call.cancel()

        samples = await scraped_until(
            service,
            lambda seen: (
                value(seen, "num_requests_running") == 0
                and value(seen, "num_requests_waiting") == 0
                and value(seen, "kv_cache_usage_ratio") == 0
            ),
        )
        assert value(samples, "num_tokens_waiting") == 0
        assert value(samples, "queue_head_waits", reason="slots") == 0
        assert total(samples, "kv_cache_blocks") == value(samples, "kv_cache_total_blocks")


async def test_an_engine_crash_makes_its_requests_wait_and_counters_continue() -> None:
    async with started(*simulated(), *ARGUMENTS) as service:
        async with service.channel() as channel:
            running = Stream(channel, 300)
            await running.until_running()
            os.kill(await service.next_pid("engine"), signal.SIGKILL)
            assert await running.outcome() is grpc.StatusCode.OK

        samples = await scraped_until(
            service,
            lambda seen: (
                value(seen, "engine_restarts_total") == 1
                and value(seen, "engine_up") == 1
                and total(seen, "requests_total") == 1
                # The tokens of the dead engine are counted from its shared memory.
                and value(seen, "generation_tokens_total") >= 300
                and value(seen, "num_requests_running") == 0
            ),
        )

        assert value(samples, "request_replays_total") == 1
        assert value(samples, "queue_wait_seconds_total", reason="engine_lost") > 0
        assert value(samples, "request_duration_seconds_count", outcome="ok") == 1
