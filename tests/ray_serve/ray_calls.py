"""Calls to the Ray cluster, and the counters of its engines."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import operations_service_pb2 as operations_pb
from penstock.v1 import operations_service_pb2_grpc as operations_grpc
from penstock.v1 import stats_pb2
from ray_serve.ray_cluster import Replica
from support.timeout import TEST_TIMEOUT_S


def stub(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.GenerationServiceStub(channel)


async def read_until_tokens(call: Any) -> list[pb.GenerateResponse]:
    """Return all messages up to the first with tokens."""
    messages: list[pb.GenerateResponse] = []
    async for message in call:
        messages.append(message)
        if message.WhichOneof("event") == "tokens":
            return messages
    raise AssertionError("the stream ended early")


async def until_counted(
    replicas: Iterable[Replica],
    count: Callable[[stats_pb2.ModelTotals], int],
    least: int,
    since: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the increase of each replica's counter over its value in `since`, by address.

    Wait until all replicas have reported again and the sum is at least `least`; each reports about
    once a second.
    """
    began_s = time.time()
    counts: dict[str, int] = {}
    replicas = tuple(replicas)
    is_enough = asyncio.Event()

    async def watch(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stats: Any = operations_grpc.OperationsServiceStub(channel).WatchStats(
                operations_pb.WatchStatsRequest()
            )
            async for reported in stats:
                if reported.stats.time.ToNanoseconds() < began_s * 1e9:
                    continue
                counts[address] = count(reported.stats.models[0].totals) - (since or {}).get(
                    address, 0
                )
                if len(counts) == len(replicas) and sum(counts.values()) >= least:
                    is_enough.set()

    watches = [asyncio.create_task(watch(replica.operations)) for replica in replicas]
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await is_enough.wait()
    finally:
        for each in watches:
            each.cancel()
        await asyncio.wait(watches)
    return counts


async def read_to_end(call: Any) -> grpc.aio.AioRpcError | None:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None
