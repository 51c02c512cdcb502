"""Any GenerateRequest and any bytes give a valid generation or a rejection, never
another exception.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.generation import read_generation
from penstock.server.rpc.parsing import num_unknown_fields, parse
from penstock.server.rpc.statuses import abort_of
from penstock.v1.generation_service_pb2 import GenerateRequest
from support.fronts import INFO
from support.request_draws import requests

LIMITS = Limits.from_config(FrontConfig(max_prompt_bytes=200), INFO)
REJECTIONS = {
    ErrorReason.INVALID_ARGUMENT,
    ErrorReason.PROMPT_TOO_LONG,
    ErrorReason.FEATURE_UNSUPPORTED,
    ErrorReason.MODEL_NOT_FOUND,
    ErrorReason.ADAPTER_NOT_FOUND,
}


def outcome(data: bytes) -> GenerationSpec | RequestError:
    """Return the generation that a handler gets from this message, or the rejection."""
    try:
        return read_generation(parse(GenerateRequest, data), LIMITS, ("tiny",))
    except RequestError as error:
        return error


@given(message=requests())
def test_any_message_is_read_or_rejected(message: GenerateRequest) -> None:
    if message.WhichOneof("prompt") is None:
        message.text_prompt.text = "hello"
    generation = outcome(message.SerializeToString())
    if isinstance(generation, RequestError):
        assert generation.reason in REJECTIONS
        abort = abort_of(generation.failure)
        assert len(abort.message.encode()) <= 1024
        return
    params = generation.sampling.params
    numbers = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        *(bias for _, bias in params.logit_bias),
    )
    assert all(math.isfinite(number) for number in numbers)
    assert 0 <= params.temperature <= 2
    assert 0 < params.top_p <= 1
    assert 0 <= params.top_k < 2**31
    assert 1 <= generation.sampling.num_outputs <= 16
    assert generation.stopping.max_tokens is None or generation.stopping.max_tokens >= 1
    # A NaN that passed validation would make the generation unequal to itself.
    assert structs.replace(generation) == generation


@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_or_rejected(data: bytes) -> None:
    result = outcome(data)
    if isinstance(result, RequestError):
        assert result.reason in REJECTIONS | {ErrorReason.MALFORMED_REQUEST}


@given(message=requests(), data=st.data())
def test_mutated_bytes_are_parsed_or_malformed(
    message: GenerateRequest, data: st.DataObject
) -> None:
    encoded = bytearray(message.SerializeToString(deterministic=True))
    if encoded:
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] ^= data.draw(st.integers(1, 255))
        cut = data.draw(st.integers(0, len(encoded)))
        encoded = encoded[:cut] if data.draw(st.booleans()) else encoded
    result = outcome(bytes(encoded))
    if isinstance(result, RequestError):
        assert result.reason in REJECTIONS | {ErrorReason.MALFORMED_REQUEST}


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b"\x0a\x01\xff", "model"),
        (b"\x12\x03\x0a\x01\xff", "text_prompt.text"),
        (
            b"\x22\x0c\x0a\x03\x0a\x01a\x0a\x05\x12\x03\x0a\x01\xff",
            "chat_prompt.messages[1].parts[0].text",
        ),
        (b"\x3a\x06\x1a\x01a\x1a\x01\xff", "stopping.stop_strings[1]"),
    ],
)
def test_string_that_is_not_utf8_is_named(data: bytes, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(GenerateRequest, data)
    assert [violation.path for violation in caught.value.failure.violations] == [path]


def test_search_for_what_is_wrong_is_bounded() -> None:
    turn = b"\x22\x02\x0a\x00"  # a chat with one empty turn
    data = turn * 4_000 + b"\x0a\x01\xff"
    with pytest.raises(RequestError) as caught:
        parse(GenerateRequest, data)
    assert caught.value.reason is ErrorReason.MALFORMED_REQUEST
    assert caught.value.failure.violations == (), "it stopped before the end"


def test_unknown_fields_are_counted_at_any_depth() -> None:
    inner = b"\x0a\x01a\xfa\x7f\x01x"
    data = b"\x12" + bytes([len(inner)]) + inner + b"\xfa\x7f\x01x"
    assert num_unknown_fields(parse(GenerateRequest, data)) == 2
