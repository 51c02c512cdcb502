"""Calls through Ray Serve's ingress to the service in a replica: the requests and responses that
the ingress passes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

import penstock.client as pc
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2, stats_pb2
from ray_serve.ray_calls import read_to_end, read_until_tokens, stub, until_counted
from ray_serve.ray_cluster import RayCluster, slow_steps
from support.generate_requests import greedy
from support.otlp_receiver import grpc_receiver
from support.service import Stream, health_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SPREAD = {"num_replicas": 2, "max_replicas_per_node": 1}
ROOMY = (*slow_steps(), "--max-num-seqs", "32", "--max-seq-len", "4096")
TIGHT = (*slow_steps(), "--max-num-seqs", "1", "--max-num-waiting", "1")
REPLICA = "penstock-replica"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


def num_completed(totals: stats_pb2.ModelTotals) -> int:
    return totals.num_completed


def num_cancelled(totals: stats_pb2.ModelTotals) -> int:
    return totals.num_cancelled


async def test_every_node_accepts_calls_and_every_replica_has_its_engine(
    cluster: RayCluster,
) -> None:
    replicas = cluster.deploy(*ROOMY, **SPREAD)
    before = await until_counted(replicas, num_completed, 0)

    assert len({replica.node for replica in replicas}) == 2
    assert len({replica.address for replica in replicas}) == 2
    took: Counter[str | bytes] = Counter()
    for node in (0, 1):
        async with cluster.channel(node) as channel:
            streams = [Stream(channel, 12) for _ in range(8)]
            codes = await asyncio.gather(*(each.outcome() for each in streams))
            assert codes == [grpc.StatusCode.OK] * 8
            assert all(each.has_finished and each.num_tokens == 12 for each in streams)
            took.update([(await each.trailers())[REPLICA] for each in streams])
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
    assert took.total() == 16
    assert set(took) == {replica.replica for replica in replicas}
    after = await until_counted(replicas, num_completed, 16, before)
    assert min(after.values()) > 0


@pytest.mark.parametrize("multiplex", [False, True])
async def test_all_client_calls_are_relayed(cluster: RayCluster, multiplex: bool) -> None:
    cluster.deploy(*ROOMY, **SPREAD)

    async with pc.Client(cluster.addresses[1], multiplex=multiplex) as client:
        whole = await client.generate_once("hello", max_tokens=8, ignore_eos=True)
        assert whole.finished.usage.num_completion_tokens == 8
        events = [event async for event in client.generate("hello", max_tokens=8, ignore_eos=True)]
        assert isinstance(events[0], pc.Accepted)
        assert isinstance(events[-1], pc.Finished)
        assert [model.name for model in await client.list_models()] == ["demo"]
        with pytest.raises(pc.InvalidArgument) as rejected:
            await client.generate_once("hello", temperature=-1.0)
    assert [each.field for each in rejected.value.field_violations] == ["sampling.temperature"]


async def test_bytes_that_are_no_message_are_rejected_by_the_service(cluster: RayCluster) -> None:
    cluster.deploy(*ROOMY, **SPREAD)

    async with cluster.channel() as channel:
        generate: Any = channel.unary_stream("/penstock.v1.GenerationService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await generate(b"\xff\xff\xff").read()

    assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rejected.value.details() == "the bytes cannot be parsed as the expected message"


async def test_a_disconnected_client_cancels_its_request(cluster: RayCluster) -> None:
    replicas = cluster.deploy(*ROOMY, **SPREAD)
    before = await until_counted(replicas, num_cancelled, 0)

    async with cluster.channel() as channel:
        call = stub(channel).Generate(greedy(4000))
        await read_until_tokens(call)
        call.cancel()
        await until_counted(replicas, num_cancelled, 1, before)


async def test_a_request_is_cancelled_by_id_wherever_it_is(cluster: RayCluster) -> None:
    cluster.deploy(*ROOMY, **SPREAD)

    # If it reached a random one of the two replicas, a Cancel would fail half of the time.
    for number in range(6):
        async with cluster.channel(0) as channel, cluster.channel(1) as other:
            call = stub(channel).Generate(greedy(400, request_id=f"mine-{number}"))
            await read_until_tokens(call)
            await stub(other).Cancel(pb.CancelRequest(request_id=f"mine-{number}"))
            last = [message async for message in call][-1]
        reasons = [output.finish_reason for output in last.finished.outputs]
        assert reasons == [state_pb2.FINISH_REASON_CANCELLED]


async def test_a_full_queue_rejects_with_the_reason_of_the_service(cluster: RayCluster) -> None:
    cluster.deploy(*TIGHT, **SPREAD)

    async with cluster.channel() as channel:
        calls = [stub(channel).Generate(greedy(100)) for _ in range(12)]
        ends = await asyncio.gather(*(read_to_end(call) for call in calls))

    rejected = [end for end in ends if end is not None]
    assert 0 < len(rejected) < 12
    for end in rejected:
        assert end.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reported: dict[str, Any] = dict(end.trailing_metadata() or ())
        assert b"QUEUE_FULL" in reported["grpc-status-details-bin"]
        assert int(reported["grpc-retry-pushback-ms"]) > 0


async def test_a_deadline_in_the_request_is_enforced_by_the_engine(cluster: RayCluster) -> None:
    cluster.deploy(*ROOMY, **SPREAD)

    async with pc.Client(cluster.addresses[0]) as client:
        with pytest.raises(pc.DeadlineExceeded) as missed:
            async for _ in client.generate(
                "hello", max_tokens=400, ignore_eos=True, total_timeout_s=0.3
            ):
                pass

    assert missed.value.failure.metadata["deadline"] == "total"


async def test_a_deadline_of_the_call_ends_the_request(cluster: RayCluster) -> None:
    replicas = cluster.deploy(*ROOMY, **SPREAD)
    before = await until_counted(replicas, num_cancelled, 0)

    async with cluster.channel() as channel:
        end = await read_to_end(stub(channel).Generate(greedy(4000), timeout=1.0))
        assert end is not None
        assert end.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_counted(replicas, num_cancelled, 1, before)


async def test_a_trace_continues_in_the_service(cluster: RayCluster) -> None:
    with grpc_receiver() as receiver:
        cluster.deploy(*ROOMY, "--otlp-endpoint", receiver.endpoint, num_replicas=1)
        async with cluster.channel() as channel:
            call = stub(channel).Generate(
                greedy(4), metadata=(("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
            )
            assert await read_to_end(call) is None
            trailers = dict(await call.trailing_metadata())
        spans = await asyncio.to_thread(receiver.wait_for_spans, 3)

    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert SPAN_ID in {span.parent_span_id.hex() for span in spans}
    assert trailers["request_id"]
