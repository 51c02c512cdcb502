"""Cases 10 and 15 to 19: more requests than the service can serve, and the statuses of rejections.

The test runs each step of the engine: a rejection without a step was made by the front.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import QuotaFailure
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.client import Client, QueueFull, RetryPolicy, TokenPrompt
from penstock.client.call_settings import CallSettings
from penstock.client.retry_budget import RetryBudget
from penstock.scheduler.batch import StepResult
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.quotas import TenantQuota
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from support.overload_calls import Calls, fill_slots, publish_queue, read_all
from support.published_queue import PublishedQueue
from support.stepped_service import SteppedService, ids_of, request, stepped
from support.timeout import TEST_TIMEOUT_S

SLOTS = 4
MAX_WAITING = 8
NUM_TOKENS = 3
FULL = SchedulerConfig(max_num_waiting=MAX_WAITING, max_num_batched_tokens=256)


def num_received(service: SteppedService) -> int:
    """Return the number of requests that the engine has received: live ones, and rejected ones
    whose end is not reported yet.
    """
    service.read_commands()
    return len(service.engine.requests) + len(service.engine.events.ends)


async def filled(service: SteppedService, num_tokens: int) -> tuple[Calls, PublishedQueue]:
    """Fill the service's slots with requests of `num_tokens` output tokens, and then its queue;
    return the calls and the published queue.
    """
    calls = Calls()
    await fill_slots(service, calls, SLOTS, num_tokens)
    shown = publish_queue(service)
    for _ in range(MAX_WAITING):
        calls.send(service, request(NUM_TOKENS))
    await service.until_live(SLOTS + MAX_WAITING)
    shown.publish()
    return calls, shown


@pytest.mark.parametrize("is_shown", [True, False])
async def test_case_15_a_burst_of_ten_times_the_queue_limit(
    text: ModelText, is_shown: bool
) -> None:
    """As many requests are admitted as the queue may hold. The front rejects the others if it sees
    the length of the queue (`is_shown`), otherwise the engine does.
    """
    async with stepped(text, scheduler=FULL, max_num_seqs=SLOTS) as service:
        calls, burst = Calls(), Calls()
        await fill_slots(service, calls, SLOTS, num_tokens=40)
        if is_shown:
            publish_queue(service).queue_s = None
        num_steps, num_sent = service.num_steps, 10 * MAX_WAITING
        for _ in range(num_sent):
            burst.send(service, request(NUM_TOKENS))
        num_rejected = num_sent - MAX_WAITING
        if not is_shown:
            await service.until(lambda: num_received(service) == SLOTS + num_sent)
            service.step()
        await service.until(lambda: len(burst.done) == num_rejected)
        assert service.num_steps == num_steps + (not is_shown)
        assert len(burst.rejected) == num_rejected
        for error in burst.rejected:
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.info.reason == "QUEUE_FULL"
            assert error.retry_s is not None
            assert error.retry_s > 0.0
            assert error.pushback_ms == str(round(error.retry_s * 1000))
        await service.until(lambda: len(burst.done) == num_sent, steps=True)
        assert [len(ids) for ids in burst.served] == [NUM_TOKENS] * MAX_WAITING
        await service.until(lambda: len(calls.done) == SLOTS, steps=True)
        await service.until_released()
        assert service.is_clean()


async def test_case_15_a_free_queue_place_is_used_as_soon_as_it_is_published(
    text: ModelText,
) -> None:
    async with stepped(text, scheduler=FULL, max_num_seqs=SLOTS) as service:
        _, shown = await filled(service, num_tokens=2)
        shown.queue_s = 1.5
        shown.publish()
        rejected = Calls()
        rejected.send(service, request())
        await service.until(lambda: len(rejected.done) == 1)
        (error,) = rejected.rejected
        assert error.retry_s is not None
        assert error.retry_s >= 1.5, "as long as the queue is, and a share of it more"
        while len(service.engine.queue) == MAX_WAITING:
            service.step()
        shown.publish()
        num_free = MAX_WAITING - len(service.engine.queue)
        late = Calls()
        for _ in range(num_free + 2):
            late.send(service, request(NUM_TOKENS))
        await service.until(lambda: len(late.done) == 2)
        assert len(late.rejected) == 2
        await service.until(lambda: len(late.done) == num_free + 2, steps=True)
        assert len(late.served) == num_free


@pytest.mark.parametrize("is_shown", [True, False])
async def test_case_16_huge_prompts_fill_the_queue(text: ModelText, is_shown: bool) -> None:
    config = SchedulerConfig(max_num_waiting_tokens=200, max_num_batched_tokens=256)
    async with stepped(text, scheduler=config, max_num_seqs=1) as service:
        calls = Calls()
        await fill_slots(service, calls, 1, num_tokens=20)
        if is_shown:
            publish_queue(service)
        calls.send(service, request(NUM_TOKENS, range(100, 250)))
        await service.until_live(2)
        huge = calls.send(service, request(NUM_TOKENS, range(300, 400)))
        # No step runs before the engine has the request, so the engine is still full.
        await service.until(lambda: huge.done() or service.server.num_live_requests == 3)
        await service.until(huge.done, steps=not is_shown)
        (error,) = calls.rejected
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.info.reason == "QUEUE_FULL"
        small = calls.send(service, request(NUM_TOKENS, range(400, 420)))
        await service.until(small.done, steps=True)
        assert len(calls.served[-1]) == NUM_TOKENS
        assert len(calls.rejected) == 1


async def test_case_17_health_during_a_burst(text: ModelText) -> None:
    """A service that rejects most requests is busy, not unhealthy."""
    async with stepped(text, scheduler=FULL, max_num_seqs=SLOTS) as service:
        health: Any = health_pb2_grpc.HealthStub(service.channel)
        reported: list[int] = []
        watch = health.Watch(health_pb2.HealthCheckRequest())
        watching = asyncio.ensure_future(_note(watch, reported))
        await service.until(lambda: bool(reported))
        calls, burst = Calls(), Calls()
        await fill_slots(service, calls, SLOTS, num_tokens=40)
        publish_queue(service)
        for _ in range(10 * MAX_WAITING):
            burst.send(service, request(NUM_TOKENS))
            # The engine takes no step meanwhile: a health check does not wait for it.
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=TEST_TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await service.until(lambda: len(burst.done) == 9 * MAX_WAITING)
        assert len(burst.rejected) == 9 * MAX_WAITING
        watching.cancel()
        assert reported == [health_pb2.HealthCheckResponse.SERVING]


async def test_case_18_one_tenant_floods(text: ModelText) -> None:
    """The other tenant's requests take as many steps as without the flood, and none fails."""
    most_live = 3
    config = SchedulerConfig(
        max_num_waiting=MAX_WAITING,
        max_num_batched_tokens=256,
        tenant_quota=TenantQuota(max_num_live=most_live),
    )
    front = FrontConfig(tenant_metadata_key="x-tenant")
    async with stepped(text, front=front, scheduler=config, max_num_seqs=SLOTS) as service:
        alone = await _steps_to_first_token(service)
        flood, others = Calls(), list[int]()
        for _ in range(10):
            for _ in range(2 * SLOTS):
                flood.send(service, request(12), tenant="a")
            others.append(await _steps_to_first_token(service))
        assert max(others) <= 1.5 * alone
        await service.until(lambda: len(flood.done) == len(flood.tasks), steps=True)
        assert len(flood.served) >= most_live
        assert flood.rejected
        for error in flood.rejected:
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.info.reason == "QUOTA_EXCEEDED"
            assert error.retry_s is not None
        for failed in flood.errors:
            assert _quota_of(failed) == ("tenant:a", f"max_num_live is {most_live}")


async def test_case_18_a_limit_per_minute_returns_a_retry_time(text: ModelText) -> None:
    now_s = 5000.0
    config = SchedulerConfig(tenant_quota=TenantQuota(max_requests_per_minute=6))
    front = FrontConfig(tenant_metadata_key="x-tenant")
    async with stepped(text, front=front, scheduler=config, clock=lambda: now_s) as service:
        calls = Calls()
        for _ in range(8):
            await _ended(service, calls.send(service, request(1), tenant="a"))
        assert len(calls.served) == 6
        for error in calls.rejected:
            assert error.retry_s is not None
            assert 10.0 <= error.retry_s <= 12.5, "a sixth of a minute, and a share of it more"
        now_s += 9.0
        await _ended(service, calls.send(service, request(1), tenant="a"))
        assert len(calls.rejected) == 3, "too early"
        now_s += 1.0
        await _ended(service, calls.send(service, request(1), tenant="a"))
        assert len(calls.served) == 7
        await _ended(service, calls.send(service, request(1), tenant="b"))
        assert len(calls.served) == 8, "another tenant's account is its own"


async def test_case_19_retries_respect_the_retry_delay_and_are_limited(text: ModelText) -> None:
    num_calls, reported_s = 100, 1.5
    async with stepped(text, scheduler=FULL, max_num_seqs=SLOTS) as service:
        _, shown = await filled(service, num_tokens=40)
        shown.queue_s = reported_s
        shown.publish()
        slept_s: list[float] = []

        async def sleep(delay_s: float) -> None:
            slept_s.append(delay_s)
            await asyncio.sleep(0)

        settings = CallSettings(retry=RetryPolicy(max_attempts=4), budget=RetryBudget(reserve=0))
        async with Client(service.address, settings=settings, sleep=sleep) as client:
            ends = await asyncio.gather(
                *(_ask(client) for _ in range(num_calls)), return_exceptions=True
            )
        assert all(isinstance(end, QueueFull) for end in ends)
        num_offered = service.front.admission.num_rejected
        assert num_offered == num_calls + len(slept_s)
        assert num_calls < num_offered <= 1.2 * num_calls
        assert min(slept_s) >= reported_s


async def test_case_19_a_retry_after_the_returned_time_is_served(text: ModelText) -> None:
    async with stepped(text, scheduler=FULL, max_num_seqs=SLOTS) as service:
        calls, shown = await filled(service, num_tokens=2)
        shown.publish()
        slept_s: list[float] = []

        async def sleep(delay_s: float) -> None:
            slept_s.append(delay_s)
            # During the delay the service processes its queue.
            await service.until(lambda: len(calls.done) == len(calls.tasks), steps=True)
            shown.publish()

        async with Client(service.address, sleep=sleep) as client:
            asking = asyncio.ensure_future(_ask(client))
            await service.until(asking.done, steps=True)
            assert asking.result() == NUM_TOKENS
        assert len(slept_s) == 1


async def test_case_10_a_deadline_shorter_than_the_queue(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 7000.0
    config = SchedulerConfig(max_num_waiting=64, max_num_batched_tokens=256)
    async with stepped(text, scheduler=config, max_num_seqs=1, clock=lambda: now_s) as service:
        collect = service.engine.executor.collect

        def slowly() -> StepResult:
            nonlocal now_s
            now_s += 0.25
            return collect()

        monkeypatch.setattr(service.engine.executor, "collect", slowly)
        calls = Calls()
        # Prefill and decode steps, from which the engine learns their durations.
        for length in (1, 20, 40, 60) * 6:
            calls.send(service, request(NUM_TOKENS, range(100, 100 + length)))
            await service.until(lambda: len(calls.done) == len(calls.tasks), steps=True)
        for _ in range(3):
            long = request(300)
            long.stopping.min_tokens = 300
            calls.send(service, long)
        await service.until_live(3)
        service.step()
        num_computed = len(service.engine.computed)
        late = request(4)
        late.scheduling.ttft_timeout.FromMilliseconds(5000)
        task = calls.send(service, late)
        await service.until(task.done, steps=True)
        (error,) = calls.rejected
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.info.reason == "DEADLINE_UNREACHABLE"
        assert int(error.info.metadata["estimate_ms"]) > 5000
        assert error.retry_s is not None
        assert len(service.engine.computed) == num_computed, "nothing was computed for it"


async def _ask(client: Client) -> int:
    num_tokens = 0
    async for event in client.generate(
        TokenPrompt(ids=(5, 6, 7)), max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0
    ):
        num_tokens += getattr(event, "num_tokens", 0)
    return num_tokens


async def _note(watch: Any, reported: list[int]) -> None:
    async for answer in watch:
        reported.append(answer.status)


async def _ended(service: SteppedService, task: asyncio.Task[Any]) -> None:
    await service.until(task.done, steps=True)
    await service.until_released()


async def _steps_to_first_token(service: SteppedService) -> int:
    """Send a request of tenant b; return the number of steps from its receipt by the engine to its
    first token.
    """
    call: Any = service.stub.Generate(request(NUM_TOKENS), metadata=(("x-tenant", "b"),))
    reading = asyncio.ensure_future(read_all(call))

    def live() -> list[Any]:
        return [found for found in service.engine.requests.values() if found.spec.tenant == "b"]

    async with asyncio.timeout(TEST_TIMEOUT_S):
        while not live():
            service.read_commands()
            await asyncio.sleep(0)
    (mine,) = live()
    num_steps = 0
    while mine.slot < 0 or service.engine.arrays.num_tokens[mine.slot] == len(mine.spec.prompt_ids):
        service.step()
        num_steps += 1
        assert num_steps < 100
    await service.until(reading.done, steps=True)
    end = reading.result()
    assert not isinstance(end, grpc.aio.AioRpcError)
    assert len(ids_of(end)) == NUM_TOKENS
    return num_steps


def _quota_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    data = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(data, bytes)
    quota = QuotaFailure()
    assert any(detail.Unpack(quota) for detail in Status.FromString(data).details)
    (violation,) = quota.violations
    return violation.subject, violation.description
