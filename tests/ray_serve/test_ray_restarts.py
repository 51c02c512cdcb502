"""Replicas that die, start, stop and are replaced while calls continue."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import grpc.aio
import pytest

from penstock.v1 import generation_service_pb2 as pb
from ray_serve.ray_calls import read_to_end, read_until_tokens, stub
from ray_serve.ray_cluster import RayCluster, slow_steps
from support.generate_requests import greedy
from support.service import Stream, until_gone

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SPREAD = {"num_replicas": 2, "max_replicas_per_node": 1}
ROOMY = (*slow_steps(), "--max-num-seqs", "32")
NARROW = (*slow_steps(), "--max-num-seqs", "2", "--max-num-waiting", "100")


async def test_a_killed_replica_ends_its_service_and_is_replaced(
    cluster: RayCluster,
) -> None:
    first, second = cluster.deploy(*ROOMY, **SPREAD)

    async with cluster.channel() as channel:
        streams = [Stream(channel, 300) for _ in range(12)]
        await asyncio.gather(*(each.until_running() for each in streams))
        os.kill(first.pid, signal.SIGKILL)
        codes = await asyncio.gather(*(each.outcome() for each in streams))
        await until_gone(first.service_pid)
        # Another replica serves now, without a wait until it accepts calls.
        assert await Stream(channel, 4).outcome() is grpc.StatusCode.OK

    # Ray Serve reports every error of a replica as INTERNAL.
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INTERNAL}
    replicas = await asyncio.to_thread(cluster.until, 2, [first.replica])
    assert second.replica in {replica.replica for replica in replicas}
    assert len({replica.node for replica in replicas}) == 2


async def test_a_killed_engine_is_replaced_by_its_service(cluster: RayCluster) -> None:
    (replica,) = cluster.deploy(*ROOMY, num_replicas=1)

    async with cluster.channel() as channel:
        running = Stream(channel, 100)
        await running.until_running()
        os.kill(_engine_of(replica.service_pid), signal.SIGKILL)
        assert await running.outcome() is grpc.StatusCode.OK
        assert running.num_tokens == 100

    assert await asyncio.to_thread(cluster.until, 1) == [replica]


async def test_a_lost_service_is_replaced_with_its_replica(cluster: RayCluster) -> None:
    (replica,) = cluster.deploy(*ROOMY, num_replicas=1)

    os.kill(replica.service_pid, signal.SIGKILL)

    (other,) = await asyncio.to_thread(cluster.until, 1, [replica.replica])
    assert other.service_pid != replica.service_pid


async def test_a_new_version_takes_over_without_an_error(cluster: RayCluster) -> None:
    before = cluster.deploy(*ROOMY, **SPREAD)
    is_over = asyncio.Event()
    codes: list[grpc.StatusCode] = []

    async def caller(node: int) -> None:
        async with cluster.channel(node) as channel:
            while not is_over.is_set():
                codes.append(await Stream(channel, 20).outcome())

    async with asyncio.TaskGroup() as callers:
        for number in range(8):
            callers.create_task(caller(number % 2))
        after = await asyncio.to_thread(
            lambda: cluster.deploy(*ROOMY, "--default-max-tokens", "64", **SPREAD)
        )
        is_over.set()

    assert not {each.replica for each in before} & {each.replica for each in after}
    for replica in before:
        await until_gone(replica.service_pid)
    assert len(codes) > 16
    assert set(codes) == {grpc.StatusCode.OK}


async def test_a_queue_adds_a_replica_and_idleness_removes_it(cluster: RayCluster) -> None:
    policy = {
        "policy_function": "penstock.gateway.ray.scaling:QueueTimePolicy",
        "policy_kwargs": {"target_queue_time_s": 0.2},
    }
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.5,
        "look_back_period_s": 1.0,
        "metrics_interval_s": 0.2,
        "policy": policy,
    }
    cluster.deploy(*NARROW, autoscaling_config=scaling, max_replicas_per_node=1)
    is_over = asyncio.Event()

    async def caller() -> None:
        async with cluster.channel() as channel:
            while not is_over.is_set():
                assert await Stream(channel, 50).outcome() is grpc.StatusCode.OK

    async with asyncio.TaskGroup() as callers:
        for _ in range(10):
            callers.create_task(caller())
        grown = await asyncio.to_thread(cluster.until, 2)
        is_over.set()
    assert len({replica.node for replica in grown}) == 2

    assert len(await asyncio.to_thread(cluster.until, 1)) == 1


async def test_a_session_resumes_on_its_replica(cluster: RayCluster) -> None:
    router = {
        "request_router_class": (
            "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
        ),
        # Otherwise a replica that is slow to report its queue length loses the session to another.
        "request_router_kwargs": {"num_fallback_replicas": 0},
    }
    replicas = cluster.deploy(*ROOMY, **SPREAD, request_router_config=router)
    await _until_ingresses_know(cluster, {replica.replica for replica in replicas})

    for number in range(4):
        session = (("session_id", f"session-{number}"),)
        wanted = greedy(60, request_id=f"kept-{number}")
        wanted.resume_timeout.FromSeconds(30)
        async with cluster.channel(0) as channel:
            call = stub(channel).Generate(wanted, metadata=session)
            seen = await read_until_tokens(call)
        async with cluster.channel(1) as channel:
            rest = stub(channel).Resume(
                pb.ResumeRequest(request_id=f"kept-{number}", next_sequence=len(seen)),
                metadata=session,
            )
            seen += [message.response async for message in rest]
        assert [message.sequence for message in seen] == list(range(len(seen)))
        assert sum(message.tokens.num_tokens for message in seen) == 60


async def _until_ingresses_know(cluster: RayCluster, known: set[str]) -> None:
    """Wait until the proxies on both nodes route sessions to all of the replicas in `known`; until
    then they may route all sessions to one replica.

    Ray Serve notifies each proxy some time after new replicas run, at different times.
    """
    sessions = [(("session_id", f"session-{number}"),) for number in range(12)]
    took: list[list[str]] = []
    num_rounds = 0
    async with cluster.channel(0) as channel, cluster.channel(1) as other:
        for _ in range(200):
            took = [
                await asyncio.gather(*(_replica_of(each, session) for session in sessions))
                for each in (channel, other)
            ]
            is_known = took[0] == took[1] and set(took[0]) == known
            num_rounds = num_rounds + 1 if is_known else 0
            if num_rounds == 3:
                return
    raise AssertionError(f"sessions go to {took}")


async def _replica_of(channel: grpc.aio.Channel, session: tuple[tuple[str, str], ...]) -> str:
    call = stub(channel).Generate(greedy(1), metadata=session)
    assert await read_to_end(call) is None
    replica: str = dict(await call.trailing_metadata())["penstock-replica"]
    return replica


def _engine_of(service_pid: int) -> int:
    children = Path(f"/proc/{service_pid}/task/{service_pid}/children").read_text(encoding="ascii")
    for pid in children.split():
        if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("the service has no engine")
