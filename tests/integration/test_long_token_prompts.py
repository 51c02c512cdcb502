"""Prompts of very many token ids are converted on a thread, after a check of their number."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.server.rpc.mapping_in import prompt
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import ServedFront, rich_error
from support.timeout import TEST_TIMEOUT_S

MANY = 100
"""Prompts with more ids are converted on a thread."""


class BlockingConversions:
    """Stands in for `token_array`: records whether it runs on the loop's thread; a long conversion
    waits until `released` is set.
    """

    def __init__(self) -> None:
        self.are_on_loop: list[bool] = []
        self.released = threading.Event()
        self.released.set()
        self._loop_thread = threading.get_ident()
        self._convert = prompt.token_array

    def __call__(self, ids: Sequence[int]) -> Any:
        if len(ids) > MANY:
            assert self.released.wait(TEST_TIMEOUT_S)
        self.are_on_loop.append(threading.get_ident() == self._loop_thread)
        return self._convert(ids)


@pytest.fixture
async def conversions(monkeypatch: pytest.MonkeyPatch) -> BlockingConversions:
    found = BlockingConversions()
    monkeypatch.setattr(prompt, "token_array", found)
    monkeypatch.setattr(prompt, "IDS_AT_ONCE", MANY)
    return found


def request(ids: list[int]) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend(ids)
    message.stopping.max_tokens = 1
    return message


def submit(key: int, message: pb.GenerateRequest) -> pb.MultiplexRequest:
    return pb.MultiplexRequest(submit=pb.MultiplexSubmit(key=key, generation=message))


async def rejection(served: ServedFront, message: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(message, timeout=TEST_TIMEOUT_S).read()
    return caught.value


@pytest.mark.parametrize(("num_ids", "is_on_loop"), [(MANY, True), (MANY + 1, False)])
@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Multiplex"])
async def test_long_prompts_are_converted_on_a_thread(
    served: ServedFront,
    conversions: BlockingConversions,
    method: str,
    num_ids: int,
    is_on_loop: bool,
) -> None:
    ids = [60 + index % 30 for index in range(num_ids)]
    stub, message = served.stub, request(ids)
    match method:
        case "Generate":
            call: Any = stub.Generate(message)
        case "GenerateOnce":
            call = stub.GenerateOnce(pb.GenerateOnceRequest(generation=message))
        case _:
            call = stub.Multiplex()
            await call.write(submit(1, message))
    (spec,) = await served.port.next_submission()
    assert spec.prompt_ids.dtype == "int32"
    assert spec.prompt_ids.tolist() == ids
    assert conversions.are_on_loop == [is_on_loop]
    call.cancel()


async def test_unknown_ids_of_a_long_prompt_are_named(
    served: ServedFront, conversions: BlockingConversions
) -> None:
    message = request([72] * 200)
    message.request_id = "mine"
    message.token_prompt.ids[150] = 10**6
    error = rich_error(await rejection(served, message))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.fields == ["token_prompt.ids[150]"]
    assert conversions.are_on_loop == [False]


@pytest.mark.parametrize(("num_ids", "max_tokens"), [(512, 1), (600, 1), (500, 13)])
async def test_a_prompt_that_cannot_fit_is_rejected_without_conversion(
    served: ServedFront, conversions: BlockingConversions, num_ids: int, max_tokens: int
) -> None:
    message = request([72] * num_ids)
    message.stopping.max_tokens = max_tokens
    error = rich_error(await rejection(served, message))
    assert error.info.reason == "PROMPT_TOO_LONG"
    assert error.info.metadata["num_prompt_tokens"] == str(num_ids)
    assert conversions.are_on_loop == []


async def test_a_conversion_does_not_block_other_requests_of_its_stream(
    served: ServedFront, conversions: BlockingConversions
) -> None:
    conversions.released.clear()
    call = served.stub.Multiplex()
    try:
        for key, num_ids in ((1, 200), (2, 3)):
            await call.write(submit(key, request([72] * num_ids)))
        (spec,) = await served.port.next_submission()
        assert len(spec.prompt_ids) == 3
    finally:
        conversions.released.set()
    (spec,) = await served.port.next_submission()
    assert len(spec.prompt_ids) == 200
    call.cancel()
