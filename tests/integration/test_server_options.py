"""The server's gRPC options take effect, and gRPC core knows their names.

The core ignores unknown names. If an option is set to the core's default, the test uses another
value, because the default has no visible effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from chaos import raw_http2 as h2
from penstock.server.rpc import options, read_limiter
from penstock.server.rpc.options import KeepaliveConfig, ServerOptions, server_options
from penstock.server.text.model_text import ModelText
from penstock.v1 import model_service_pb2, model_service_pb2_grpc
from support.fronts import ServedFront, collect, serving
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S

NAMES = [name for name, _ in server_options(KeepaliveConfig())]
NEVER_MS = 3_600_000
KIB = 1024


@pytest.fixture(scope="module")
def core() -> bytes:
    """Provide the bytes of gRPC's library, which contain the names of its options."""
    (path,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    return path.read_bytes()


def other(suffix: str, value: int) -> ServerOptions:
    """Return the server option whose name ends with `suffix`, with the value `value`."""
    (name,) = (name for name in NAMES if name.endswith(suffix))
    return ((name, value),)


async def outcome(
    served: ServedFront, message: bytes = b"", num_metadata_bytes: int = 0
) -> grpc.StatusCode:
    call = cast("Any", served.channel).unary_unary("/penstock.v1.ModelService/ListModels")(
        message, metadata=(("x-pad", "a" * num_metadata_bytes),), timeout=TEST_TIMEOUT_S
    )
    return cast("grpc.StatusCode", await call.code())


def padding(num_bytes: int) -> bytes:
    """Return a message of `num_bytes` bytes that consists of one unknown field."""
    length = num_bytes - 5  # one byte of the tag, four of the length
    varint = bytes(
        [length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21]
    )
    return b"\x7a" + varint + bytes(length)


@pytest.mark.parametrize("name", NAMES)
def test_grpc_core_has_every_option_name(core: bytes, name: str) -> None:
    assert name.encode() + b"\0" in core
    assert name[:-1].encode() + b"\0" not in core, "a name that is misspelt is found out"
    assert NAMES.count(name) == 1


@pytest.mark.parametrize("max_bytes", [64 * KIB, 4096 * KIB])
async def test_messages_are_bounded_to_the_byte(
    text: ModelText, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    assert options.MAX_MESSAGE_BYTES == 4096 * KIB
    monkeypatch.setattr(options, "MAX_MESSAGE_BYTES", max_bytes)
    async with serving(text) as served:
        assert await outcome(served, padding(max_bytes)) is grpc.StatusCode.OK
        too_large = await outcome(served, padding(max_bytes + 1))
        assert too_large is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("max_kib", [8, 64])
async def test_metadata_is_bounded_by_a_soft_and_a_hard_limit(
    text: ModelText, monkeypatch: pytest.MonkeyPatch, max_kib: int
) -> None:
    assert options.MAX_METADATA_BYTES == 8 * KIB
    monkeypatch.setattr(options, "MAX_METADATA_BYTES", max_kib * KIB)
    monkeypatch.setattr(read_limiter, "MAX_ANY_METADATA_BYTES", 2 * max_kib * KIB)
    async with serving(text) as served:
        within = await outcome(served, num_metadata_bytes=(max_kib - 1) * KIB)
        assert within is grpc.StatusCode.OK
        # Between the soft and the hard limit gRPC rejects at random, here about half of the calls.
        # Its default soft limit, four fifths of the hard limit, would accept all of them.
        for _ in range(40):
            between = await outcome(served, num_metadata_bytes=max_kib * KIB * 3 // 2)
            if between is grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
        else:
            pytest.fail("there is no soft limit")
        beyond = await outcome(served, num_metadata_bytes=(2 * max_kib + 1) * KIB)
        assert beyond is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with h2.raw_connection(served.address) as connection:
            await connection.until(lambda: bool(connection.counts[h2.SETTINGS]))
        assert connection.settings[6] == 2 * max_kib * KIB, "SETTINGS_MAX_HEADER_LIST_SIZE"
        assert connection.settings[3] == 1024, "SETTINGS_MAX_CONCURRENT_STREAMS"


async def test_a_connection_that_answers_no_ping_is_closed(text: ModelText) -> None:
    keepalive = KeepaliveConfig(server_ping_interval_s=1.0, server_ping_timeout_s=0.1)
    # The timeout of pings ends it without that of keepalive.
    alone = other("keepalive_timeout_ms", NEVER_MS)
    async with (
        serving(text, keepalive=keepalive, extra_options=alone) as served,
        h2.raw_connection(served.address, unacknowledged=[h2.PING]) as connection,
    ):
        await connection.until_closed()
        assert connection.counts[h2.PING]


async def test_a_stream_beyond_the_connection_grace_is_closed(text: ModelText) -> None:
    keepalive = KeepaliveConfig(max_connection_age_s=0.5, max_connection_age_grace_s=0.1)
    async with serving(text, keepalive=keepalive) as served:
        submission = asyncio.ensure_future(served.port.next_submission())
        # On a slow machine, a connection can be closed before its request is submitted.
        while not submission.done():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(served.stub.Generate(text_request()))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        (spec,) = submission.result()
        keys, _ = await served.port.next_cancel()
        assert keys == (spec.key,)


async def test_old_connections_get_a_goaway(text: ModelText) -> None:
    keepalive = KeepaliveConfig(max_connection_age_s=0.1, max_connection_age_grace_s=60.0)
    async with (
        serving(text, keepalive=keepalive) as served,
        h2.raw_connection(served.address) as connection,
    ):
        await connection.until(lambda: bool(connection.counts[h2.GOAWAY]))
        assert connection.counts[h2.GOAWAY]


@pytest.mark.parametrize(("max_pending", "is_dropping"), [(None, False), (50, True)])
async def test_calls_that_arrive_at_once_are_not_dropped(
    text: ModelText, max_pending: int | None, is_dropping: bool
) -> None:
    names = ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit")
    options = () if max_pending is None else tuple((name, max_pending) for name in names)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(text, extra_options=options))
        stubs: list[Any] = []
        for _ in range(3):  # a connection each, as one carries a limited number of calls
            channel = grpc.aio.insecure_channel(
                served.address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            await stack.enter_async_context(channel)
            stubs.append(model_service_pb2_grpc.ModelServiceStub(channel))
        request = model_service_pb2.ListModelsRequest()
        calls = [stubs[index % 3].ListModels(request) for index in range(1500)]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            codes = {await call.code() for call in calls}
    assert (codes != {grpc.StatusCode.OK}) is is_dropping
