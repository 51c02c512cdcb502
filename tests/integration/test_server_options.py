"""The server's gRPC options take effect, and gRPC core knows their names.

The core ignores unknown names. Where our value is the core's default, another value is tested,
because the default would show no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from penstock.server.rpc import options, read_limiter
from penstock.server.rpc.options import KeepaliveConfig, ServerOptions, server_options
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2, model_service_pb2_grpc
from support.fronts import PATIENCE_S, ServedFront, collect, serving

NAMES = [name for name, _ in server_options(KeepaliveConfig())]
NEVER_MS = 3_600_000
INT_MAX = 2**31 - 1
KIB = 1024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture(scope="module")
def core() -> bytes:
    """Provide the library that reads the options."""
    (path,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    return path.read_bytes()


def other(suffix: str, value: int) -> ServerOptions:
    """Return our one option whose name has this suffix, with another value."""
    (name,) = (name for name in NAMES if name.endswith(suffix))
    return ((name, value),)


async def outcome(
    served: ServedFront, message: bytes = b"", num_metadata_bytes: int = 0
) -> grpc.StatusCode:
    """Return the status of a small call that is padded."""
    call = cast("Any", served.channel).unary_unary("/penstock.v1.ModelService/ListModels")(
        message, metadata=(("x-pad", "a" * num_metadata_bytes),), timeout=PATIENCE_S
    )
    return cast("grpc.StatusCode", await call.code())


def padding(num_bytes: int) -> bytes:
    """Return a message of that size, made of one unknown field."""
    length = num_bytes - 5  # one byte of the tag, four of the length
    varint = bytes(
        [length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21]
    )
    return b"\x7a" + varint + bytes(length)


@contextlib.asynccontextmanager
async def connection(served: ServedFront, greeting: bytes) -> AsyncGenerator[asyncio.StreamReader]:
    """Open a connection on which nothing is sent after the greeting."""
    host, _, port = served.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(greeting)
        async with asyncio.timeout(PATIENCE_S):
            yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(4096):
            received += data
    return received


@pytest.mark.parametrize("name", NAMES)
def test_the_core_knows_every_name(core: bytes, name: str) -> None:
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
        # Between the limits chance decides, about half and half here. Were there no soft limit of
        # ours, the core's own, four fifths of the hard one, would let all of these pass.
        for _ in range(40):
            between = await outcome(served, num_metadata_bytes=max_kib * KIB * 3 // 2)
            if between is grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
        else:
            pytest.fail("there is no soft limit")
        beyond = await outcome(served, num_metadata_bytes=(2 * max_kib + 1) * KIB)
        assert beyond is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with connection(served, PREFACE) as reader:
            header = await reader.readexactly(9)
            settings = await reader.readexactly(int.from_bytes(header[:3], "big"))
        told = dict(struct.iter_unpack(">HI", settings))
        assert told[6] == 2 * max_kib * KIB, "SETTINGS_MAX_HEADER_LIST_SIZE"


async def test_a_connection_that_answers_no_ping_is_closed(text: ModelText) -> None:
    keepalive = KeepaliveConfig(server_ping_interval_s=1.0, server_ping_timeout_s=0.1)
    # The timeout of pings ends it without that of keepalive.
    alone = other("keepalive_timeout_ms", NEVER_MS)
    async with (
        serving(text, keepalive=keepalive, extra_options=alone) as served,
        connection(served, PREFACE) as reader,
    ):
        assert await read_to_end(reader)


async def test_a_connection_that_says_nothing_is_closed(text: ModelText) -> None:
    soon = other("server_handshake_timeout_ms", 300)
    async with serving(text, extra_options=soon) as served, connection(served, b"") as reader:
        await read_to_end(reader)


async def test_a_stream_that_outlives_its_connections_grace_is_cut(text: ModelText) -> None:
    keepalive = KeepaliveConfig(max_connection_age_s=0.3, max_connection_age_grace_s=0.1)
    async with serving(text, keepalive=keepalive) as served:
        message = pb.GenerateRequest()
        message.text_prompt.text = "hello"
        call = served.stub.Generate(message)
        (spec,) = await served.port.next_submission()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        keys, _ = await served.port.next_cancel()
        assert keys == (spec.key,)


@pytest.mark.parametrize(("hard_limit", "is_dropping"), [(50, True), (INT_MAX, False)])
async def test_the_hard_limit_ends_the_chance_of_calls_beyond_the_soft_one(
    text: ModelText, hard_limit: int, is_dropping: bool
) -> None:
    limits = other("max_pending_requests", 50) + other("requests_hard_limit", hard_limit)
    async with serving(text, extra_options=limits) as served:
        models = model_service_pb2_grpc.ModelServiceStub(served.channel)
        calls = [models.ListModels(model_service_pb2.ListModelsRequest()) for _ in range(800)]
        async with asyncio.timeout(PATIENCE_S):
            codes = {await call.code() for call in calls}
    assert (codes != {grpc.StatusCode.OK}) is is_dropping
