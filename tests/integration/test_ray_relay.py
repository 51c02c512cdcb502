"""The service process of a Ray replica and the relay to it, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from penstock.gateway.ray.load import LoadGauge, ReplicaLoad, load_of
from penstock.gateway.ray.methods import METHODS
from penstock.gateway.ray.relay import CallStatus, Relay, forwarded_metadata
from penstock.gateway.ray.service import ReplicaService, ReplicaServiceFailed
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2, stats_pb2
from ray_serve.ray_calls import read_until_tokens, stub
from support.generate_requests import greedy
from support.multiplex import submit
from support.service import simulated, until_gone
from support.timeout import TEST_TIMEOUT_S

OPTIONS = (*simulated(), "--metrics-port", "off", "--drain-timeout-s", "1")
PACKAGE_ROOT = Path(__file__).parents[2] / "deploy" / "ray"
OWNER = """
import sys
from penstock.gateway.ray.service import ReplicaService
print(ReplicaService(sys.argv[1:], start_timeout_s=60).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def service() -> Iterator[ReplicaService]:
    service = ReplicaService(OPTIONS, start_timeout_s=TEST_TIMEOUT_S)
    yield service
    service.kill()


@pytest.fixture
async def relay(service: ReplicaService) -> AsyncIterator[Relay]:
    relay = Relay(service.address)
    yield relay
    await relay.close()


async def test_calls_are_relayed_as_bytes_with_their_statuses(
    service: ReplicaService, relay: Relay
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        listed = await relay.unary(METHODS["ListModels"], b"", ())
        assert listed.status.code is grpc.StatusCode.OK
        models = model_service_pb2.ListModelsResponse.FromString(listed.data).models
        assert [model.name for model in models] == ["demo"]

        data = greedy(6).SerializeToString()
        *messages, status = [item async for item in relay.stream(METHODS["Generate"], data, ())]
        assert isinstance(status, CallStatus)
        assert status.code is grpc.StatusCode.OK
        read = [pb.GenerateResponse.FromString(m) for m in messages if isinstance(m, bytes)]
        assert [message.sequence for message in read] == list(range(len(messages)))
        assert read[-1].HasField("finished")

        (rejected,) = [item async for item in relay.stream(METHODS["Generate"], b"\xff", ())]
        assert isinstance(rejected, CallStatus)
        assert rejected.code is grpc.StatusCode.INVALID_ARGUMENT
        details = dict(rejected.trailers)["grpc-status-details-bin"]
        assert isinstance(details, bytes)
        assert b"MALFORMED_REQUEST" in details

        once = await relay.unary(METHODS["GenerateOnce"], b"\xff", ())
        assert (once.data, once.status.code) == (b"", grpc.StatusCode.INVALID_ARGUMENT)

        gauge = LoadGauge(service.operations)
        stack.push_async_callback(gauge.close)
        assert (await gauge.read()).num_pending == 0


async def test_a_caller_that_stops_reading_cancels(service: ReplicaService, relay: Relay) -> None:
    data = greedy(1000, request_id="left").SerializeToString()
    async with contextlib.aclosing(relay.stream(METHODS["Generate"], data, ())) as items:
        async for item in items:
            assert isinstance(item, bytes)
            if pb.GenerateResponse.FromString(item).HasField("tokens"):
                break

    # The request's id is free again, because the request has ended.
    async with grpc.aio.insecure_channel(service.address) as channel:
        again = stub(channel).Generate(greedy(4, request_id="left"))
        await read_until_tokens(again)


async def test_a_stream_ends_when_both_sides_have_sent_all(relay: Relay) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for key in (1, 2):
            yield submit(key, edit=_short).SerializeToString()

    *messages, status = [i async for i in relay.bidirectional(METHODS["Multiplex"], requests(), ())]

    read = [pb.MultiplexResponse.FromString(m) for m in messages if isinstance(m, bytes)]
    finished = [
        event.key for each in read for event in each.events if event.response.HasField("finished")
    ]
    assert sorted(finished) == [1, 2]
    assert isinstance(status, CallStatus)
    assert status.code is grpc.StatusCode.OK


async def test_a_stream_whose_caller_disconnects_is_cancelled(relay: Relay) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield submit(1, edit=_long).SerializeToString()
        raise ConnectionError("the caller is gone")

    *_, status = [i async for i in relay.bidirectional(METHODS["Multiplex"], requests(), ())]

    assert isinstance(status, CallStatus)
    assert status.code is grpc.StatusCode.CANCELLED


def test_the_exit_of_a_drained_service_is_detected() -> None:
    service = ReplicaService(OPTIONS, start_timeout_s=TEST_TIMEOUT_S)
    try:
        service.check()
        service.drain(TEST_TIMEOUT_S)
        with pytest.raises(ReplicaServiceFailed, match="ended with 0"):
            service.check()
    finally:
        service.kill()


def test_a_service_that_cannot_start_reports_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ReplicaServiceFailed, match="ended with 2"):
        ReplicaService(("--executor", "none"), start_timeout_s=TEST_TIMEOUT_S)
    assert "--executor" in capfd.readouterr().err


def test_a_service_that_is_not_ready_in_time_is_killed() -> None:
    with pytest.raises(ReplicaServiceFailed, match="in time"):
        ReplicaService(OPTIONS, start_timeout_s=0.0)


async def test_a_service_does_not_outlive_its_owner() -> None:
    paths = [str(PACKAGE_ROOT), *filter(None, sys.path)]
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, *OPTIONS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())

    owner.send_signal(signal.SIGKILL)

    await owner.wait()
    await until_gone(pid)


def test_metadata_for_ray_serve_is_not_passed_on() -> None:
    reported = (
        ("application", "penstock"),
        ("request_id", "1"),
        ("session_id", "2"),
        ("multiplexed_model_id", "3"),
        ("user-agent", "grpc-c"),
        ("grpc-accept-encoding", "gzip"),
        ("traceparent", "00-1-2-01"),
        ("authorization", "Bearer x"),
        ("x-some-bin", b"\x00"),
    )
    assert forwarded_metadata(reported) == reported[-3:]


def test_the_load_is_that_of_the_fullest_model() -> None:
    stats = stats_pb2.ServerStats()
    assert load_of(stats) == ReplicaLoad(queue_time_s=0.0, busy_share=0.0, num_pending=0)
    idle = stats.models.add(max_num_seqs=8, num_processing=2)
    idle.queue.p50.FromMilliseconds(250)
    busy = stats.models.add(max_num_seqs=4, num_processing=4, num_pending=3)
    busy.estimated_queue_duration.FromMilliseconds(1500)
    busy.queue.p50.FromMilliseconds(9000)

    assert load_of(stats) == ReplicaLoad(queue_time_s=1.5, busy_share=1.0, num_pending=3)
    assert load_of(stats).figures() == {"queue_time_s": 1.5, "busy_share": 1.0, "num_pending": 3}


def _short(generation: pb.GenerateRequest) -> None:
    generation.stopping.max_tokens = 4


def _long(generation: pb.GenerateRequest) -> None:
    generation.stopping.max_tokens = 1000
    generation.stopping.ignore_eos = True
