"""Any request of a gateway becomes a GenerateRequest, or a rejection that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway.smg.request_mapping import penstock_request
from penstock.gateway.smg.service import with_gateway_paths
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, Failure, RequestError
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.generation import read_generation
from penstock.server.rpc.parsing import num_unknown_fields, parse
from support.fronts import INFO

LIMITS = Limits.from_config(FrontConfig(), INFO)
REASONS = {
    ErrorReason.INVALID_ARGUMENT,
    ErrorReason.PROMPT_TOO_LONG,
    ErrorReason.MALFORMED_REQUEST,
    ErrorReason.FEATURE_UNSUPPORTED,
}
FOREIGN_ROOTS = {field.name for field in vllm.GenerateRequest.DESCRIPTOR.fields} | {"input"}

numbers = st.floats(width=32)
params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": numbers,
        "top_p": numbers,
        "top_k": st.integers(0, 2**32 - 1),
        "min_p": numbers,
        "frequency_penalty": numbers,
        "presence_penalty": numbers,
        "repetition_penalty": numbers,
        "max_tokens": st.integers(0, 2**32 - 1),
        "min_tokens": st.integers(0, 2**32 - 1),
        "stop": st.lists(st.text(max_size=70), max_size=18),
        "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=18),
        "ignore_eos": st.booleans(),
        "n": st.integers(0, 40),
        "logprobs": st.integers(-2, 30),
        "prompt_logprobs": st.integers(-2, 30),
        "seed": st.integers(-(2**31), 2**31 - 1),
        "logit_bias": st.dictionaries(st.integers(-5, 2**31 - 1), numbers, max_size=4),
        "json_schema": st.text(max_size=20),
    },
)


def rejection_of(take: Callable[[], object]) -> Failure | None:
    """Return the failure that `take` raises, with the gateway's field paths, or None if it raises
    none.
    """
    try:
        take()
    except RequestError as error:
        return with_gateway_paths(error.failure)
    return None


def check_converted_or_rejected(message: vllm.GenerateRequest) -> None:
    def take() -> None:
        own = penstock_request(message)
        num_unknown_fields(message)
        generation = read_generation(own, LIMITS, ("tiny",))
        assert generation.output.return_token_ids

    failure = rejection_of(take)
    if failure is not None:
        assert failure.reason in REASONS
        for violation in failure.violations:
            assert violation.path.partition(".")[0].partition("[")[0] in FOREIGN_ROOTS


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=6), given_params=params, id_=st.text())
def test_every_request_is_converted_or_rejected(
    ids: list[int], given_params: dict[str, Any], id_: str
) -> None:
    message = vllm.GenerateRequest(request_id=id_)
    message.tokenized.input_ids.extend(ids)
    message.sampling_params.CopyFrom(vllm.SamplingParams(**given_params))

    check_converted_or_rejected(message)


@given(data=st.binary(max_size=200))
def test_bytes_are_a_request_or_malformed(data: bytes) -> None:
    failure = rejection_of(lambda: parse(vllm.GenerateRequest, data))

    if failure is None:
        check_converted_or_rejected(vllm.GenerateRequest.FromString(data))
    else:
        assert failure.reason is ErrorReason.MALFORMED_REQUEST


def test_fields_of_a_later_release_are_counted_next_to_a_map() -> None:
    message = vllm.GenerateRequest(text="hello")
    message.sampling_params.logit_bias[3] = 1.0
    later = message.SerializeToString() + b"\xf8\x3f\x01"  # field 1023, an integer

    assert num_unknown_fields(vllm.GenerateRequest.FromString(later)) == 1
