"""Token ids and unknown fields of a message are read without protobuf objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.rpc import parsing
from penstock.server.rpc.mapping_in.prompt import token_array
from penstock.server.rpc.options import MAX_MESSAGE_BYTES
from penstock.server.rpc.parsing import MAX_UNKNOWN_BYTES, MAX_UNKNOWN_FIELDS, num_unknown_fields
from penstock.v1.generation_service_pb2 import GenerateRequest, MultiplexSubmit
from penstock.v1.model_service_pb2 import DetokenizeRequest
from penstock.v1.prompt_pb2 import ContentPart

NUMBERS = st.integers(0, 2**32 - 1) | st.integers(0, 300)


@given(ids=st.lists(NUMBERS, max_size=300))
def test_an_array_has_the_numbers_of_the_list(ids: list[int]) -> None:
    prompt = GenerateRequest()
    prompt.token_prompt.ids.extend(ids)
    parsed = GenerateRequest.FromString(prompt.SerializeToString())
    for listed in (parsed.token_prompt.ids, DetokenizeRequest(token_ids=ids).token_ids):
        found = token_array(listed)
        assert found.dtype == np.int64
        assert found.tolist() == ids


def test_a_long_list() -> None:
    ids = [0, 127, 128, 16_383, 16_384, 2**21, 2**28, 2**32 - 1] * 20_000
    assert token_array(DetokenizeRequest(token_ids=ids).token_ids).tolist() == ids


FIELD = b"\xf8\x3f\x01"


@pytest.fixture
def num_listed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each searched message, the number of unknown fields that became
    Python objects.
    """
    listed: list[int] = []

    def counted(message: Any) -> Any:
        found = UnknownFieldSet(message)
        listed.append(len(found))
        return found

    monkeypatch.setattr(parsing, "UnknownFieldSet", counted)
    return listed


def padded(num_fields: int, field: bytes = FIELD, num_messages: int = 1) -> GenerateRequest:
    message = GenerateRequest()
    for _ in range(num_messages):
        message.chat_prompt.messages.add(role="user", parts=[ContentPart(text="hi")])
    return GenerateRequest.FromString(message.SerializeToString() + field * num_fields)


def test_a_few_unknown_fields_are_counted_at_any_depth() -> None:
    message = padded(3)
    message.chat_prompt.messages[0].MergeFromString(FIELD * 4)
    assert num_unknown_fields(message) == 7
    assert num_unknown_fields(padded(MAX_UNKNOWN_FIELDS)) == MAX_UNKNOWN_FIELDS
    large = b"\xfa\x3f" + b"\xe0\x5d" + b"x" * 12_000
    assert num_unknown_fields(padded(1, large)) == 1


def test_token_ids_are_not_written_out_to_count_what_is_unknown() -> None:
    submit = MultiplexSubmit()
    submit.generation.token_prompt.ids.extend(range(4000))
    submit.generation.sampling.logit_bias.add(token_id=1, bias=2.0)
    submit.generation.MergeFromString(FIELD * 2)
    assert num_unknown_fields(submit) == 2
    assert not submit.generation.token_prompt.ids
    assert num_unknown_fields(submit) == 0


def test_a_message_without_unknown_fields_is_not_searched(num_listed: list[int]) -> None:
    assert num_unknown_fields(padded(0, num_messages=10_000)) == 0
    assert num_listed == []


@pytest.mark.parametrize(
    "num_fields", [MAX_UNKNOWN_FIELDS + 1, MAX_UNKNOWN_BYTES // len(FIELD) + 1, 1_390_000]
)
def test_too_many_unknown_fields_are_rejected_without_being_listed(
    num_listed: list[int], num_fields: int
) -> None:
    message = padded(num_fields)
    assert message.ByteSize() < MAX_MESSAGE_BYTES
    with pytest.raises(RequestError) as caught:
        num_unknown_fields(message)
    assert caught.value.failure.reason is ErrorReason.MALFORMED_REQUEST
    assert "unknown fields" in caught.value.failure.message
    assert sum(num_listed) <= MAX_UNKNOWN_BYTES // 2


def test_the_search_is_bounded_too(num_listed: list[int]) -> None:
    num_unknown_fields(padded(1, num_messages=100_000))
    assert len(num_listed) <= 10_000
