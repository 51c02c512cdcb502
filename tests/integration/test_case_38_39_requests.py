"""Cases 38 and 39: an in-process service names the invalid fields of a request, and serves or
rejects any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given

from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import rich_error
from support.generate_requests import text_request
from support.request_draws import requests
from support.stepped_service import SteppedService, running
from support.timeout import TEST_TIMEOUT_S, until_true

C = grpc.StatusCode
GENERATE = "/penstock.v1.GenerationService/Generate"
EXPECTED = {
    C.OK,
    C.INVALID_ARGUMENT,
    C.RESOURCE_EXHAUSTED,
    C.NOT_FOUND,
    C.UNIMPLEMENTED,
    # Requests may bring their own deadlines.
    C.DEADLINE_EXCEEDED,
}


def edited(edit: Callable[[pb.GenerateRequest], object]) -> bytes:
    request = text_request()
    request.stopping.max_tokens = 2
    edit(request)
    return request.SerializeToString()


def sampling(**values: float) -> bytes:
    def edit(request: pb.GenerateRequest) -> None:
        for name, value in values.items():
            setattr(request.sampling, name, value)

    return edited(edit)


ROWS = [
    ("garbage", b"\xff\xff\xff", C.INVALID_ARGUMENT, None),
    ("truncated", edited(lambda _: None)[:-1], C.INVALID_ARGUMENT, None),
    ("no UTF-8", b"\x12\x03\x0a\x01\xff", C.INVALID_ARGUMENT, "text_prompt.text"),
    ("prompt of another wire type", b"\x10\x01", C.INVALID_ARGUMENT, "prompt"),
    ("empty", b"", C.INVALID_ARGUMENT, "prompt"),
    *(
        (f"{name} {value}", sampling(**{name: value}), C.INVALID_ARGUMENT, f"sampling.{name}")
        for name, values in {
            "temperature": (math.nan, math.inf, -math.inf, -0.1, 2.1),
            "top_p": (math.nan, 0.0, -1.0, 1.1),
            "min_p": (math.nan, -0.1, 1.1),
            "presence_penalty": (math.nan, -2.1, 2.1),
            "frequency_penalty": (math.inf, -2.1, 2.1),
            "repetition_penalty": (math.nan, 0.0),
        }.items()
        for value in values
    ),
    (
        "n 17",
        edited(lambda r: setattr(r.sampling, "num_outputs", 17)),
        C.INVALID_ARGUMENT,
        "sampling.num_outputs",
    ),
    (
        "max_tokens 0",
        edited(lambda r: setattr(r.stopping, "max_tokens", 0)),
        C.INVALID_ARGUMENT,
        "stopping.max_tokens",
    ),
    (
        "max_tokens of ten octets",
        edited(lambda _: None) + b"\x3a\x0b\x08" + b"\xff" * 9 + b"\x01",
        C.INVALID_ARGUMENT,
        None,
    ),
    (
        "token id beyond the vocabulary",
        edited(lambda r: r.token_prompt.ids.append(2**32 - 1)),
        C.INVALID_ARGUMENT,
        "token_prompt.ids[0]",
    ),
    (
        "prompt beyond the context",
        edited(lambda r: r.token_prompt.ids.extend([5] * 1024)),
        C.INVALID_ARGUMENT,
        "token_prompt.ids",
    ),
    (
        "a prompt of nearly 4 MiB",
        edited(lambda r: setattr(r.text_prompt, "text", "a" * 4_000_000)),
        C.INVALID_ARGUMENT,
        "text_prompt.text",
    ),
    (
        "17 stop strings",
        edited(lambda r: r.stopping.stop_strings.extend(["x"] * 17)),
        C.INVALID_ARGUMENT,
        "stopping.stop_strings",
    ),
    (
        "a stop string of 65 characters",
        edited(lambda r: r.stopping.stop_strings.append("x" * 65)),
        C.INVALID_ARGUMENT,
        "stopping.stop_strings[0]",
    ),
    ("unknown fields", edited(lambda _: None) + b"\xfa\x7f\x01x", C.OK, None),
    (
        "NUL and control characters",
        edited(lambda r: setattr(r.text_prompt, "text", "\0\x01")),
        C.OK,
        None,
    ),
]


async def ended(
    channel: Any, data: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.AioRpcError | None:
    call = channel.unary_stream(GENERATE)(data, timeout=TEST_TIMEOUT_S, metadata=metadata)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("data", "code", "field"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
async def test_case_38_invalid_fields_are_named(
    served: SteppedService, data: bytes, code: grpc.StatusCode, field: str | None
) -> None:
    error = await ended(served.channel, data)
    if error is None:
        assert code is C.OK
        return
    reported = rich_error(error)
    assert reported.code is code
    assert field is None or any(name.startswith(field) for name in reported.fields)
    for word in ("Error", "Exception", "Traceback", "object at", "/"):
        assert word not in reported.message, "names of classes and places are ours alone"


async def test_case_38_odd_metadata_is_accepted(served: SteppedService) -> None:
    odd = (("traceparent", "zz-" + "0" * 400), ("x-request-id", "~" * 3000), ("tracestate", "="))
    assert await ended(served.channel, edited(lambda _: None), odd) is None


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[SteppedService]:
    async with running(text) as served:
        yield served


def test_case_39_any_request_is_served_or_rejected(text: ModelText) -> None:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        served = runner.run(stack.enter_async_context(running(text)))

        @given(message=requests())
        def play(message: pb.GenerateRequest) -> None:
            if message.WhichOneof("prompt") is None:
                message.token_prompt.ids.extend([5, 6, 7])
            if not 0 < message.stopping.max_tokens <= 50:
                message.stopping.max_tokens = 3
            runner.run(check_served_or_rejected(message.SerializeToString()))

        async def check_served_or_rejected(data: bytes) -> None:
            error = await ended(served.channel, data)
            assert error is None or error.code() in EXPECTED, error
            assert error is None or error.code() is not C.UNKNOWN
            # Each call ends once, and no request is left.
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await until_true(lambda: not len(served.front.table))

        play()
        assert served.front.counters.num_internal_errors == 0
        assert served.link.thread.is_alive()
        assert served.link.dispatcher.num_live == 0
        runner.run(stack.aclose())
