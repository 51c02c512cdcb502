"""Token ids converted to an array have the values of the list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.rpc.mapping_in.prompt import token_array
from penstock.v1.generation_service_pb2 import GenerateRequest
from penstock.v1.model_service_pb2 import DetokenizeRequest

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
