"""A gateway's request becomes a GenerateRequest. The tests cover every field of the gateway's
contract, and every default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway.smg.request_mapping import UNSUPPORTED_FIELDS, penstock_request
from penstock.gateway.smg.service import PATHS, gateway_path, with_gateway_paths
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.generation import read_generation
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import INFO

LIMITS = Limits.from_config(FrontConfig(), INFO)
EFFECTIVE_FIELDS = frozenset(
    {
        "request_id",
        "stream",
        "data_parallel_rank",
        "text",
        "tokenized.input_ids",
        "sampling_params.temperature",
        "sampling_params.top_p",
        "sampling_params.top_k",
        "sampling_params.min_p",
        "sampling_params.frequency_penalty",
        "sampling_params.presence_penalty",
        "sampling_params.repetition_penalty",
        "sampling_params.max_tokens",
        "sampling_params.min_tokens",
        "sampling_params.stop",
        "sampling_params.stop_token_ids",
        "sampling_params.ignore_eos",
        "sampling_params.n",
        "sampling_params.logprobs",
        "sampling_params.prompt_logprobs",
        "sampling_params.seed",
        "sampling_params.include_stop_str_in_output",
        "sampling_params.logit_bias",
        "sampling_params.json_schema",
        "sampling_params.regex",
        "sampling_params.grammar",
        "sampling_params.json_object",
        "sampling_params.choice.choices",
    }
)
"""Fields that have an effect."""
IGNORED_FIELDS = frozenset(
    {
        # Informative: the token ids are used.
        "tokenized.original_text",
        # The gateway detokenises our ids.
        "sampling_params.skip_special_tokens",
        "sampling_params.spaces_between_special_tokens",
        # The grammar always applies from the first token here.
        "sampling_params.grammar_from_first_token",
    }
)
"""Fields that are accepted and have no effect."""


def asked(**params: Any) -> vllm.GenerateRequest:
    """Return a request with a prompt of two token ids and with these sampling parameters."""
    message = vllm.GenerateRequest(request_id="r-1", stream=True)
    message.tokenized.input_ids.extend([5, 6])
    message.sampling_params.CopyFrom(vllm.SamplingParams(**params))
    return message


def rejected(message: vllm.GenerateRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        penstock_request(message)
    return caught.value


def field_paths(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all scalar fields, of all map fields, and of the message fields that are
    rejected as a whole.
    """
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or is_map or path in UNSUPPORTED_FIELDS:
            yield path
        else:
            yield from field_paths(field.message_type, f"{path}.")


def test_no_field_of_the_contract_is_forgotten() -> None:
    """A field that a later release adds fails this test, so that no client's option is silently
    ignored.
    """
    known = EFFECTIVE_FIELDS | IGNORED_FIELDS | UNSUPPORTED_FIELDS.keys()

    assert set(field_paths(vllm.GenerateRequest.DESCRIPTOR)) == known


def test_options_that_a_gateway_leaves_out_stay_unset() -> None:
    """A field without presence, such as top_p, is 0 if the gateway omits it. Our field must then
    stay unset.
    """
    own = penstock_request(asked())

    wanted = pb.GenerateRequest(request_id="r-1")
    wanted.token_prompt.ids.extend([5, 6])
    wanted.output.return_token_ids = True
    wanted.sampling.SetInParent()
    wanted.stopping.SetInParent()
    own.sampling.SetInParent()
    own.stopping.SetInParent()
    assert own == wanted
    generation = read_generation(own, LIMITS, ("tiny",))
    assert generation.sampling.params.temperature == 1.0
    assert generation.sampling.params.top_p == 1.0
    assert generation.sampling.params.repetition_penalty == 1.0
    assert generation.sampling.num_outputs == 1


def test_every_option_has_its_place() -> None:
    own = penstock_request(
        asked(
            temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5,
            presence_penalty=-0.5, repetition_penalty=1.5, max_tokens=9, min_tokens=2,
            stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=2, logprobs=3,
            prompt_logprobs=0, seed=11, include_stop_str_in_output=True,
            logit_bias={8: 1.5, 4: -2.0}, skip_special_tokens=True,
        )
    )  # fmt: skip

    sampling, stopping = own.sampling, own.stopping
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0.0
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 7, 0.25)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.num_outputs, sampling.seed) == (1.5, 2, 11)
    assert [(one.token_id, one.bias) for one in sampling.logit_bias] == [(4, -2.0), (8, 1.5)]
    assert (stopping.max_tokens, stopping.min_tokens) == (9, 2)
    assert list(stopping.stop_strings) == ["a", "b"]
    assert list(stopping.stop_token_ids) == [3]
    assert stopping.ignore_eos
    assert stopping.include_stop_string
    assert own.output.logprobs == 3
    assert own.output.HasField("prompt_logprobs")
    assert own.output.return_token_ids


def test_a_text_prompt_is_mapped() -> None:
    assert penstock_request(vllm.GenerateRequest(text="hello")).text_prompt.text == "hello"


@pytest.mark.parametrize("seed", [-1, -(2**31)])
def test_a_seed_below_zero_is_a_seed(seed: int) -> None:
    own = penstock_request(asked(seed=seed))

    assert own.sampling.seed == seed % 2**64


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"json_object": True}, "json_schema", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_each_kind_of_constraint_is_mapped(params: dict[str, Any], kind: str, text: str) -> None:
    own = penstock_request(asked(**params))

    assert own.constraint.WhichOneof("kind") == kind
    generation = read_generation(own, LIMITS, ("tiny",))
    assert generation.constraint is not None
    assert generation.constraint.texts == (text,)


def test_a_choice_constraint_is_mapped() -> None:
    own = penstock_request(asked(choice=vllm.ChoiceConstraint(choices=["yes", "no"])))

    assert list(own.constraint.choice.choices) == ["yes", "no"]


def test_json_object_false_is_no_constraint() -> None:
    assert not penstock_request(asked(json_object=False)).HasField("constraint")


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar"])
def test_an_empty_constraint_is_an_error(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_generation(penstock_request(asked(**{name: ""})), LIMITS, ("tiny",))

    (violation,) = with_gateway_paths(caught.value.failure).violations
    assert violation.path == f"sampling_params.{name}"


@pytest.mark.parametrize("path", sorted(UNSUPPORTED_FIELDS))
def test_an_option_that_is_not_supported_is_rejected_by_name(path: str) -> None:
    message = asked()
    if path == "kv_transfer_params_json":
        message.kv_transfer_params_json = "{}"
    elif path == "sampling_params.truncate_prompt_tokens":
        message.sampling_params.truncate_prompt_tokens = 5
    elif path == "sampling_params.structural_tag":
        message.sampling_params.structural_tag = "{}"
    elif path == "extra_mm_inputs":
        message.extra_mm_inputs.add()
    else:
        getattr(message, path).SetInParent()

    failure = rejected(message).failure

    assert failure.reason is ErrorReason.FEATURE_UNSUPPORTED
    assert failure.metadata == {"feature": UNSUPPORTED_FIELDS[path], "field": path}


def test_other_invalid_requests_are_rejected_by_field() -> None:
    nothing = vllm.GenerateRequest(request_id="r")
    other_rank = asked()
    other_rank.data_parallel_rank = 1
    for message, path in (
        (nothing, "input"),
        (other_rank, "data_parallel_rank"),
        (asked(logprobs=-1), "sampling_params.logprobs"),
        (asked(prompt_logprobs=-1), "sampling_params.prompt_logprobs"),
        (asked(logit_bias={-3: 1.0}), "sampling_params.logit_bias[-3].key"),
    ):
        (violation,) = rejected(message).failure.violations
        assert violation.path == path


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.top_p", "sampling_params.top_p"),
        ("sampling.logit_bias", "sampling_params.logit_bias"),
        ("stopping.stop_strings[3]", "sampling_params.stop[3]"),
        ("token_prompt.ids[7]", "tokenized.input_ids[7]"),
        ("token_prompt.ids", "tokenized.input_ids"),
        ("constraint.choice.choices[1]", "sampling_params.choice.choices[1]"),
        ("constraint.json_schema", "sampling_params.json_schema"),
        ("constraint.json_schema.schema", "sampling_params.json_schema"),
        ("request_id", "request_id"),
        ("metadata[x-tenant]", "metadata[x-tenant]"),
        ("promptly", "promptly"),
    ],
)
def test_fields_are_reported_by_the_names_they_were_sent_by(ours: str, theirs: str) -> None:
    assert gateway_path(ours) == theirs


def test_an_entry_of_a_map_is_reported_by_its_key() -> None:
    """Our message has a list instead of the map. The client does not know the index of an entry in
    it.
    """
    own = penstock_request(asked(logit_bias={9_999: 1.0, 7: 200.0, 5: 1.0}))
    with pytest.raises(RequestError) as caught:
        read_generation(own, LIMITS, ("tiny",))

    bias_ids = [entry.token_id for entry in own.sampling.logit_bias]
    violations = with_gateway_paths(caught.value.failure, bias_ids).violations
    assert [violation.path for violation in violations] == [
        "sampling_params.logit_bias[7].value",
        "sampling_params.logit_bias[9999].key",
    ]


def test_the_names_are_fields_of_both_contracts() -> None:
    foreign = set(field_paths(vllm.GenerateRequest.DESCRIPTOR)) | {"input", "sampling_params"}
    for ours, theirs in PATHS.items():
        assert theirs in foreign, theirs
        descriptor: Any = pb.GenerateRequest.DESCRIPTOR
        for name in ours.split("."):
            assert descriptor is not None, ours
            if name in descriptor.oneofs_by_name:
                break
            descriptor = descriptor.fields_by_name[name].message_type
