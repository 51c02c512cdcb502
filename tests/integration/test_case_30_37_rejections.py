"""Cases 30, 33 and 37: repeatedly rejected requests leave no state behind."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import RichError, rich_error
from support.stepped_service import SteppedService, ids_of, request, stepped

CANARY = (31, 32, 33)


def invalid(name: str) -> tuple[pb.GenerateRequest, str]:
    """Return an invalid request and the path of its invalid field."""
    message = request()
    match name:
        case "no tokens":
            message.stopping.max_tokens = 0
            return message, "stopping.max_tokens"
        case "minus one":
            message.sampling.temperature = -1.0
            return message, "sampling.temperature"
        case "not a number":
            message.sampling.temperature = float("nan")
            return message, "sampling.temperature"
        case "unknown token":
            message.token_prompt.ids.append(1_000_000)
            return message, "token_prompt.ids[4]"
        case _:
            del message.token_prompt.ids[:]
            return message, "token_prompt.ids"


async def rejected(service: SteppedService, message: pb.GenerateRequest) -> RichError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.end_of(service.stub.Generate(message))
    return rich_error(caught.value)


@pytest.mark.parametrize(
    "name", ["no tokens", "minus one", "not a number", "unknown token", "empty"]
)
async def test_case_30_the_same_invalid_request_twice(text: ModelText, name: str) -> None:
    async with stepped(text) as service:
        reference = ids_of(await service.end_of(service.stub.Generate(request(9, CANARY))))
        assert len(reference) == 9
        for _ in range(2):
            message, field = invalid(name)
            error = await rejected(service, message)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.fields == [field]
        canary = await service.end_of(service.stub.Generate(request(9, CANARY)))
        assert ids_of(canary) == reference
        await service.until_released()
        assert service.is_clean()


async def test_case_33_a_request_larger_than_the_kv_cache_is_rejected(text: ModelText) -> None:
    """A request that can never fit is rejected at once, because the queue behind it would wait
    forever.
    """
    async with stepped(text, num_blocks=4, max_seq_len=512) as service:
        for num_prompt, num_tokens in ((200, 8), (16, 200)):
            error = await rejected(service, request(num_tokens, range(10, 10 + num_prompt)))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.fields
            assert not service.engine.computed, "nothing was computed for it"
        fits = await service.end_of(service.stub.Generate(request(9, CANARY)))
        assert len(ids_of(fits)) == 9
        await service.until_released()
        assert service.is_clean()


async def test_case_37_an_id_that_is_in_flight(text: ModelText) -> None:
    async with stepped(text) as service:
        reference = ids_of(await service.end_of(service.stub.Generate(request(40, CANARY))))
        first = service.stub.Generate(request(40, CANARY, request_id="same"))
        await service.until_live(1)
        service.step(5)
        second = await rejected(service, request(4, request_id="same"))
        assert second.code is grpc.StatusCode.ALREADY_EXISTS
        assert second.request_id == "same"
        responses = await service.end_of(first)
        assert ids_of(responses) == reference, "the first one is unharmed"
        await service.until_released()
        again = await service.end_of(service.stub.Generate(request(40, CANARY, request_id="same")))
        assert ids_of(again) == reference, "an id is free again when its request has ended"
