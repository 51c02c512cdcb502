"""Both operations clients against the real server: the values that their methods return, their
errors, and how streams of statistics end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.client import (
    NO_RETRY,
    CallCancelled,
    FlightFormat,
    InvalidArgument,
    LogLevel,
    ModelNotFound,
    ModelState,
    OperationsClient,
    RequestNotFound,
    RequestPhase,
    RequestState,
    ServerProcess,
    ServerStats,
    SyncOperationsClient,
    Unavailable,
    WaitReason,
)
from support.client_adapters import AsyncCalls, ClientAdapter, SyncCalls
from support.operations_server import ServedOperations, serving_operations
from support.reports import small_recording
from support.snapshots import NOW_UNIX_S, SNAPSHOT, numbered, request_view, waiting_view
from support.timeout import TEST_TIMEOUT_S


class AsyncOperator(AsyncCalls):
    def __init__(self, address: str, **options: Any) -> None:
        self.client = OperationsClient(address, **options)


class SyncOperator(SyncCalls):
    def __init__(self, address: str, **options: Any) -> None:
        self.client = SyncOperationsClient(address, **options)


@pytest.fixture(params=[AsyncOperator, SyncOperator])
async def each_operator(
    request: pytest.FixtureRequest, operations: ServedOperations
) -> AsyncIterator[ClientAdapter]:
    operator = request.param(operations.address, retry=NO_RETRY)
    yield operator
    await operator.close()


@pytest.fixture
async def operator(operations: ServedOperations) -> AsyncIterator[ClientAdapter]:
    """Provide an AsyncOperator for tests of how requests are built and responses decoded. The async
    and the blocking client share that code.
    """
    operator = AsyncOperator(operations.address, retry=NO_RETRY)
    yield operator
    await operator.close()


async def watched(operator: ClientAdapter, num: int, **options: Any) -> Any:
    return await operator.items("watch_stats", until=lambda items: len(items) == num, **options)


def test_both_clients_have_the_same_methods() -> None:
    def adapter(kind: type) -> dict[str, tuple[Any, ...]]:
        return {
            name: tuple(
                (parameter.name, parameter.default, parameter.kind)
                for parameter in inspect.signature(method).parameters.values()
                if parameter.name != "sleep"
            )
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert adapter(OperationsClient) == adapter(SyncOperationsClient)


async def test_stats_are_values_in_seconds(each_operator: ClientAdapter) -> None:
    stats: ServerStats = await each_operator.call("get_stats")
    (model,) = stats.models

    assert (stats.time_s, stats.uptime_s, stats.is_draining) == (NOW_UNIX_S, 7384.5, False)
    assert (model.model, model.state) == ("tiny", ModelState.READY)
    assert (model.num_pending, model.num_processing, model.max_num_seqs) == (3, 5, 8)
    assert (model.engine_epoch, model.num_engine_restarts) == (2, 1)
    assert (model.ttft.p50_s, model.ttft.p99_s, model.ttft.num_values) == (0.05, 0.2, 11)
    assert (model.ttft.p90_s, model.itl.num_values) == (0.1, 7000)
    assert (model.total.p50_s, model.total.num_values) == (None, 0)
    assert (model.mean_step_s, model.estimated_queue_s) == (0.0125, 0.75)
    assert model.wait_reason is WaitReason.BLOCKS
    cache, totals = model.cache, model.totals
    assert (cache.num_free_blocks, cache.num_used_blocks, cache.num_total_blocks) == (25, 40, 100)
    assert (totals.num_rejected, totals.num_completed) == (2, 11)
    assert totals.num_cached_prompt_tokens == 1250
    assert (model.decode_tokens_per_s, model.prefill_tokens_per_s) == (900.0, 120.5)
    fronts = [(front.index, front.pid, front.num_live_requests) for front in stats.fronts]
    assert fronts == [(1, 4001, 5), (2, 4002, 3)]
    assert [front.num_backlog_tokens for front in stats.fronts] == [17, 0]
    with pytest.raises(ModelNotFound):
        await each_operator.call("get_stats", "other")


async def test_a_watch_ends_when_its_reader_stops(
    each_operator: ClientAdapter, operations: ServedOperations
) -> None:
    operations.fake.snapshots = [
        dataclasses.replace(SNAPSHOT, uptime_s=float(uptime_s)) for uptime_s in (1, 1, 2)
    ]
    async with asyncio.timeout(TEST_TIMEOUT_S):
        reported = await watched(each_operator, 2, interval_s=0.1)
        # The call has also ended at the server, which waits for nothing more.
        await operations.server._wrapper.wait_until_idle()
    assert [stats.uptime_s for stats in reported] == [1.0, 2.0]
    with pytest.raises(InvalidArgument) as caught:
        await watched(each_operator, 1, interval_s=0.01)
    assert caught.value.field_violations[0].field == "interval"


@pytest.mark.parametrize("kind", [AsyncOperator, SyncOperator])
async def test_closing_ends_a_watch(
    kind: type[ClientAdapter], operations: ServedOperations
) -> None:
    operator = kind(operations.address)
    asked = asyncio.Event()
    operations.fake.on_snapshot = asked.set
    watch = asyncio.ensure_future(watched(operator, 1000, interval_s=3600.0))
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await asked.wait()
        await operator.close()
        with pytest.raises(CallCancelled):
            await watch


async def test_requests_are_listed_over_all_pages(
    operator: ClientAdapter, operations: ServedOperations
) -> None:
    operations.fake.requests = numbered(2500)

    found = await operator.call("list_requests")
    assert [request.request_id for request in found] == [f"request-{n}" for n in range(2500)]
    for num in (1000, 1001):
        found = await operator.call("list_requests", max_requests=num)
        assert len(found) == min(num, 2500)


async def test_a_live_request_is_a_value(
    operator: ClientAdapter, operations: ServedOperations
) -> None:
    operations.fake.requests = (
        request_view(1, time_to_deadline_s=2.5),
        waiting_view(2, tenant="b"),
    )

    running = await operator.call("get_request", "request-1")
    (waiting,) = await operator.call("list_requests", state=RequestState.PENDING, tenant="b")
    assert (running.state, running.phase) == (RequestState.PROCESSING, RequestPhase.DECODE)
    assert (running.timings.queue_s, running.timings.ttft_s) == (1.0, 1.75)
    assert (running.timings.total_s, running.time_to_deadline_s) == (99.0, 2.5)
    assert running.queue_position is None
    assert running.history[-1].since_s == pytest.approx(NOW_UNIX_S - 99 + 1.75)
    assert (waiting.queue_position, waiting.wait_reason) == (0, WaitReason.BLOCKS)
    assert waiting.time_to_deadline_s is None
    with pytest.raises(RequestNotFound):
        await operator.call("get_request", "nobody")


async def test_commands_of_operators(operator: ClientAdapter, operations: ServedOperations) -> None:
    operations.fake.requests = numbered(2)

    assert await operator.call("drain") == 2
    assert await operator.call("drain", timeout_s=1.5) == 2
    await operator.call("set_log_level", LogLevel.WARNING)
    assert await operator.call("dump_flight_record") == "/var/flight/operator.bin"
    profile = await operator.call("profile", ServerProcess.FRONT, front_index=1, duration_s=0.25)
    assert profile == b"speedscope"
    await operator.call("profile")
    assert operations.fake.commands == [
        ("drain", None),
        ("drain", 1.5),
        ("log_level", "warning"),
        ("dump", "operator"),
        ("profile", "front 1", 0.25),
        ("profile", "engine", 5.0),
    ]


async def test_flight_records(each_operator: ClientAdapter, operations: ServedOperations) -> None:
    operations.fake.recording = small_recording()

    steps = await each_operator.call("get_flight_steps", max_steps=3)
    assert [step.step for step in steps] == [3, 4, 5]
    assert (steps[0].wait_reason, steps[0].num_waiting) == (WaitReason.SLOTS, 1)
    assert (steps[0].executor_s, steps[0].predicted_s) == (0.006, 0.5)
    assert (steps[0].inter_token_s, steps[0].admitted_request_ids) == (None, ("r3",))
    assert steps[0].shares[0].num_tokens == 20
    assert await each_operator.call("get_flight_record") == operations.fake.recording
    drawn = await each_operator.call("get_flight_record", file_format=FlightFormat.PERFETTO)
    assert json.loads(drawn)["traceEvents"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("list_requests", {"max_requests": 0}, "max_requests"),
        ("drain", {"timeout_s": -1.0}, "timeout_s"),
        ("profile", {"duration_s": float("nan")}, "duration_s"),
        ("get_stats", {"deadline_s": 0.0}, "deadline_s"),
    ],
)
async def test_arguments_that_cannot_be_sent(
    operator: ClientAdapter, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{message}:"):
        await operator.call(name, **options)


@pytest.mark.parametrize("kind", [AsyncOperator, SyncOperator])
async def test_errors_without_a_service_and_with_a_closed_client(kind: type[ClientAdapter]) -> None:
    async with serving_operations() as operations:
        address = operations.address
    operator = kind(address, retry=NO_RETRY)
    with pytest.raises(Unavailable):
        await operator.call("get_stats")
    await operator.close()
    await operator.close()
    with pytest.raises(RuntimeError, match="closed"):
        await operator.call("get_stats")


@pytest.mark.parametrize("kind", [OperationsClient, SyncOperationsClient])
def test_a_bad_address_is_rejected(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^address:"):
        kind("http://localhost")
