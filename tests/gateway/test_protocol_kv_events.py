"""A gateway's subscription to the cached blocks, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2 as common

from penstock.gateway.smg.kv_events import MAX_STREAMS
from penstock.gateway.smg.service import SERVICE_NAME, VllmEngineService
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.cache_index import CachedBlock
from penstock.server.front.config import FrontConfig
from penstock.server.front.front import Front
from penstock.server.front.submission import shared_salt
from penstock.server.ipc.frames import CacheUpdate, SnapshotPart
from penstock.server.rpc.access_control import AccessControl
from penstock.server.text.model_text import ModelText
from support.fronts import ServedFront, rich_error, serving
from support.security_files import ACME, SecurityFiles, bearer_metadata, digest
from support.stepped_service import SteppedService, request, stepped
from support.timeout import TEST_TIMEOUT_S

CODE = grpc.StatusCode
QUIET = FrontConfig(acceptance_delay_s=0.0)
ALL = SnapshotPart(index=0, num_parts=1, num_blocks=0)
NOTHING = CacheUpdate(ticket=0, changes=(), part=ALL)
TENANT_KEY = "x-tenant"


def gateway(front: Front, access: AccessControl) -> VllmEngineService:
    return VllmEngineService(front, access, wall_clock=lambda: 1.8e9)


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[ServedFront]:
    async with serving(text, QUIET, gateway=gateway, is_up=False) as served:
        served.port.publishes_cache = True
        served.port.come_up()
        yield served


def subscribe(channel: grpc.aio.Channel, start: int = 0, **more: Any) -> Any:
    call: Any = channel.unary_stream(
        f"/{SERVICE_NAME}/SubscribeKvEvents",
        request_serializer=common.SubscribeKvEventsRequest.SerializeToString,
        response_deserializer=common.KvEventBatch.FromString,
    )
    wanted = common.SubscribeKvEventsRequest(start_sequence_number=start)
    return call(wanted, timeout=TEST_TIMEOUT_S, **more)


async def read(call: Any, max_batches: int) -> None:
    for _ in range(max_batches):
        await call.read()


async def rejected(call: Any, num_batches: int = 1) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call, num_batches)
    return caught.value


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        for _ in itertools.count():
            if is_so():
                return
            await asyncio.sleep(0)


async def followed(served: ServedFront, salt: bytes = b"c", **more: Any) -> Any:
    """Open a subscription to the blocks under `salt`; return the call once the engine port has its
    listener. `more`: further arguments of the call, such as `metadata`.
    """
    call = subscribe(served.channel, **more)
    # The server sends it at once, before it has events to send.
    await call.initial_metadata()
    assert salt in served.port.cache_listeners
    return call


def block(digest: int, parent: int = 0, ids: tuple[int, ...] = (1, 2)) -> CachedBlock:
    return CachedBlock(
        digest=bytes([digest]) * 16,
        parent=bytes([parent]) * 16 if parent else b"",
        tokens=np.array(ids, dtype=np.int32).tobytes(),
    )


def hash_of(digest: int) -> int:
    return int.from_bytes(bytes([digest]) * 8, "little", signed=True)


async def test_a_snapshot_and_the_updates_after_it(served: ServedFront) -> None:
    call = await followed(served)
    read_commands = served.port.cache_listeners[b"c"]
    read_commands(CacheUpdate(ticket=0, changes=(block(1), block(2, 1), block(200, 1)), part=ALL))
    read_commands(CacheUpdate(ticket=0, changes=(b"\2" * 16, b"\1" * 16, block(3, 200, (7, 8)))))

    first, second = await call.read(), await call.read()

    assert (first.sequence_number, second.sequence_number) == (1, 2)
    assert first.timestamp == 1.8e9
    assert (first.snapshot.index, first.snapshot.count) == (0, 1)
    assert not second.HasField("snapshot")
    cleared, chain, branch = first.events
    assert cleared.HasField("cleared")
    assert not any(event.event_id for event in first.events)
    assert not chain.stored.HasField("parent_block_hash")
    assert [one.block_hash for one in chain.stored.blocks] == [hash_of(1), hash_of(2)]
    assert [(list(one.token_ids), one.block_size) for one in chain.stored.blocks] == [
        ([1, 2], 2)
    ] * 2
    assert branch.stored.parent_block_hash == hash_of(1)
    removed, stored = second.events
    assert list(removed.removed.block_hashes) == [hash_of(2), hash_of(1)]
    assert [list(one.token_ids) for one in stored.stored.blocks] == [[7, 8]]
    assert stored.stored.parent_block_hash == hash_of(200) < 0
    assert (removed.event_id, stored.event_id) == (1, 2)
    call.cancel()


async def test_the_loss_of_an_engine_clears_all_blocks_and_the_next_one_sends_a_snapshot(
    served: ServedFront,
) -> None:
    call = await followed(served)
    read_commands = served.port.cache_listeners[b"c"]
    read_commands(CacheUpdate(ticket=0, changes=(block(1),), part=ALL))
    read_commands(None)
    read_commands(CacheUpdate(ticket=0, changes=(), part=ALL))

    batches = [await call.read() for _ in range(3)]

    assert [one.sequence_number for one in batches] == [1, 2, 3]
    assert [event.WhichOneof("data") for event in batches[1].events] == ["cleared"]
    assert [event.WhichOneof("data") for event in batches[2].events] == ["cleared"]
    assert [one.HasField("snapshot") for one in batches] == [True, False, True]
    call.cancel()


async def test_a_subscriber_that_cancels_is_removed(served: ServedFront) -> None:
    call = await followed(served)
    call.cancel()

    await until(lambda: not served.port.cache_listeners)
    await until(lambda: not served.server.num_active_calls)
    assert not served.server.front.shared_writers


async def test_a_subscriber_that_reads_is_not_disconnected_by_large_updates(
    served: ServedFront,
) -> None:
    call = await followed(served)
    many = CacheUpdate(ticket=0, changes=(b"\1" * 16,) * 40_000)

    for _ in range(4):
        served.port.cache_listeners[b"c"](many)
        assert len((await call.read()).events[0].removed.block_hashes) == 40_000
    call.cancel()


async def test_a_subscriber_that_does_not_read_is_disconnected(served: ServedFront) -> None:
    call = await followed(served)
    read_commands = served.port.cache_listeners[b"c"]
    many = CacheUpdate(ticket=0, changes=(b"\1" * 16,) * 40_000)

    read_commands(many)
    read_commands(many)

    assert (await rejected(call)).code() is CODE.RESOURCE_EXHAUSTED
    assert served.server.front.counters.num_disconnected_readers == 1


async def test_a_subscriber_that_blocks_a_write_is_disconnected(served: ServedFront) -> None:
    call = await followed(served)
    read_commands = served.port.cache_listeners[b"c"]
    (writer,) = served.server.front.shared_writers
    large = CacheUpdate(ticket=0, changes=(b"\1" * 16,) * 60_000)
    num_received = 0

    def is_stuck_or_aborted() -> bool:
        """Report an empty update; return whether the writer has disconnected the reader or has
        begun another write.
        """
        read_commands(CacheUpdate(ticket=0, changes=()))
        return writer.is_aborted or writer.num_writes > num_received

    # The transport buffers an unknown number of updates before a write blocks.
    for _ in range(100):
        if writer.is_aborted:
            break
        num_received = writer.num_writes
        read_commands(large)
        await until(is_stuck_or_aborted)

    assert writer.num_writes < 100
    assert (await rejected(call, num_batches=100_000)).code() is CODE.RESOURCE_EXHAUSTED


async def test_a_drain_ends_a_subscription(served: ServedFront) -> None:
    call = await followed(served)

    served.server.front.begin_drain()

    assert rich_error(await rejected(call)).info.reason == "DRAINING"
    assert rich_error(await rejected(subscribe(served.channel))).info.reason == "DRAINING"


async def test_subscriptions_that_cannot_be_served_are_rejected(served: ServedFront) -> None:
    # No events of an earlier stream are kept, so the gateway must start over.
    assert (await rejected(subscribe(served.channel, start=7))).code() is CODE.OUT_OF_RANGE
    calls = [subscribe(served.channel) for _ in range(MAX_STREAMS)]
    for call in calls:
        await call.initial_metadata()
    assert (await rejected(subscribe(served.channel))).code() is CODE.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()

    served.port.go_down()
    assert (await rejected(subscribe(served.channel))).code() is CODE.UNAVAILABLE


async def test_an_unknown_cache_is_reported_at_once(text: ModelText) -> None:
    for config, publishes_cache in (
        (QUIET, False),
        (FrontConfig(acceptance_delay_s=0.0, is_prefix_caching=False), True),
    ):
        async with serving(text, config, gateway=gateway, is_up=False) as served:
            served.port.publishes_cache = publishes_cache
            served.port.come_up()
            error = await rejected(subscribe(served.channel))
        assert error.code() is CODE.UNIMPLEMENTED
        assert rich_error(error).info.metadata["feature"] == "kv_events"


async def test_a_tenant_receives_only_its_own_blocks(text: ModelText, tmp_path: Path) -> None:
    security_files = SecurityFiles(tmp_path)
    security = security_files.tokens()
    async with serving(text, QUIET, gateway=gateway, security=security, is_up=False) as served:
        served.port.publishes_cache = True
        served.port.come_up()
        assert (await rejected(subscribe(served.channel))).code() is CODE.UNAUTHENTICATED

        call = await followed(served, shared_salt("acme"), metadata=bearer_metadata(ACME))

        assert list(served.port.cache_listeners) == [shared_salt("acme")]
        # The subscription ends when its token is revoked.
        served.port.cache_listeners[shared_salt("acme")](NOTHING)
        assert (await call.read()).sequence_number == 1
        policy = security_files.policy_file.read_text(encoding="utf-8")
        security_files.policy_file.write_text(policy.replace(digest(ACME), digest("another")))
        security.poll()
        served.port.cache_listeners[shared_salt("acme")](NOTHING)
        assert (await rejected(call)).code() is CODE.UNAUTHENTICATED


async def test_shared_blocks_are_reported_only_to_operators(
    text: ModelText, tmp_path: Path
) -> None:
    security = SecurityFiles(tmp_path).tokens()
    config = FrontConfig(acceptance_delay_s=0.0, shares_prefixes_across_tenants=True)
    async with serving(text, config, gateway=gateway, security=security, is_up=False) as served:
        served.port.publishes_cache = True
        served.port.come_up()
        error = await rejected(subscribe(served.channel, metadata=bearer_metadata(ACME)))
        assert error.code() is CODE.PERMISSION_DENIED
    async with serving(text, config, gateway=gateway, is_up=False) as served:
        served.port.publishes_cache = True
        served.port.come_up()
        (await followed(served, shared_salt(""))).cancel()


class Replay:
    """A gateway's copy of the cached blocks, built only from the messages of a subscription."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.num_batches = 0
        self.num_snapshots = 0

    def apply(self, batch: common.KvEventBatch) -> None:
        self.num_batches += 1
        assert batch.sequence_number == self.num_batches
        self.num_snapshots += batch.HasField("snapshot")
        for event in batch.events:
            if event.HasField("cleared"):
                self.blocks.clear()
            for one in event.stored.blocks:
                assert one.block_hash not in self.blocks
                self.blocks[one.block_hash] = tuple(one.token_ids)
            for removed in event.removed.block_hashes:
                del self.blocks[removed]

    async def read(self, service: SteppedService, call: Any) -> None:
        reading = asyncio.ensure_future(call.read())
        await service.until(reading.done, steps=True)
        self.apply(reading.result())

    async def until_cached(self, service: SteppedService, call: Any, salt: bytes = b"c") -> None:
        """Read until the copy equals the engine's cached blocks under `salt`."""
        cache_index = service.engine.cache.pool.cache_index
        assert cache_index is not None
        watch = cache_index.watch(salt)
        cache_index.unwatch(watch)
        wanted = {
            int.from_bytes(one.digest[:8], "little", signed=True): tuple(
                np.frombuffer(one.tokens, dtype=np.int32).tolist()
            )
            for one in watch.take_blocks(watch.num_blocks)
        }
        while self.blocks != wanted:
            await self.read(service, call)


async def test_the_reported_blocks_equal_the_engines_cache(text: ModelText) -> None:
    async with stepped(
        text, front=QUIET, gateway=gateway, num_blocks=16, max_seq_len=128
    ) as service:
        prompt = range(10, 60)
        await service.end_of(service.stub.Generate(request(20, prompt)))
        call = subscribe(service.channel)
        replay = Replay()
        await replay.until_cached(service, call)
        digests = hash_blocks(np.array(prompt, dtype=np.int32), 16, chain_root(b"c"))
        assert len(replay.blocks) == 4  # 50 tokens and 19 that were computed
        assert {int.from_bytes(one[:8], "little", signed=True) for one in digests} <= set(
            replay.blocks
        )
        assert tuple(prompt[:16]) in replay.blocks.values()

        for number in range(8):
            await service.end_of(service.stub.Generate(request(20, range(number, number + 50))))
        await replay.until_cached(service, call)
        assert replay.num_snapshots == 1

        # The connection to the engine breaks and is restored; the engine and its cache are the
        # same.
        connection = service.port._connection.current
        assert connection is not None
        connection.abort()
        await service.until(lambda: not service.port.is_up)
        await service.link.until_up(service.port)
        await replay.read(service, call)
        assert replay.blocks == {}
        await replay.until_cached(service, call)
        assert replay.num_snapshots == 2
        call.cancel()


async def test_other_tenants_blocks_are_not_reported(text: ModelText) -> None:
    config = FrontConfig(acceptance_delay_s=0.0, tenant_metadata_key=TENANT_KEY)
    mine, theirs = ((TENANT_KEY, "mine"),), ((TENANT_KEY, "theirs"),)
    async with stepped(text, front=config, gateway=gateway) as service:
        await service.end_of(service.stub.Generate(request(4, range(40)), metadata=theirs))
        call = subscribe(service.channel, metadata=mine)
        replay = Replay()
        await replay.read(service, call)
        assert replay.blocks == {}

        await service.end_of(service.stub.Generate(request(4, range(9, 60)), metadata=theirs))
        await service.end_of(service.stub.Generate(request(4, range(5, 30)), metadata=mine))
        await replay.read(service, call)

        assert list(replay.blocks.values()) == [tuple(range(5, 21))]
        call.cancel()
