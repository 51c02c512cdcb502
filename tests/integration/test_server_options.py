"""The server's options have their effect, and the names they go by are the core's.

The core ignores a name that it does not know. Where a value of ours equals its default nothing
would show that, so another value is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from penstock.server.front.config import FrontConfig
from penstock.server.rpc import options
from penstock.server.rpc.options import KeepaliveConfig, ServerOptions, server_options
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2, model_service_pb2_grpc
from support.fronts import PATIENCE_S, ServedFront, collect, make_text, serving

NAMES = [name for name, _ in server_options(KeepaliveConfig())]
LONG_MS = 3_600_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelText]:
    text = make_text(tmp_path_factory.mktemp("model"))
    yield text
    text.close()


def other(name: str, value: int) -> ServerOptions:
    """One of our options with another value."""
    assert name in NAMES
    return ((name, value),)


@pytest.fixture(scope="module")
def core() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_core_knows_the_name(core: bytes, name: str) -> None:
    assert name.encode() + b"\0" in core


def test_the_core_knows_no_other_name(core: bytes) -> None:
    assert b"grpc.max_receive_message_lenght\0" not in core


def test_no_option_is_given_twice() -> None:
    assert len(set(NAMES)) == len(NAMES)


async def ask(
    served: ServedFront, *, num_metadata_bytes: int = 0, num_message_bytes: int = 0
) -> grpc.StatusCode:
    """The outcome of a small call made as large as asked."""
    message = b""
    if num_message_bytes:
        # A field that nobody knows, of two bytes for its number, the length and the content.
        num_content_bytes = num_message_bytes - 5
        while len(message) != num_message_bytes:
            request = pb.GenerateRequest(request_id="r")
            message = b"\xfa\x7f" + varint(num_content_bytes) + bytes(num_content_bytes)
            num_content_bytes += num_message_bytes - len(message)
            del request
    call = served.channel.unary_unary("/penstock.v1.ModelService/ListModels")(
        message,
        metadata=(("x-pad", "a" * num_metadata_bytes),) if num_metadata_bytes else None,
        timeout=PATIENCE_S,
    )
    return await call.code()
