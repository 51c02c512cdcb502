"""Converts the GenerateRequest of a gateway to Penstock's GenerateRequest, field by field.

Defines the meaning of each of the gateway's fields. Validates only values that Penstock's message
cannot represent, because the result is validated like any request. Fields without a counterpart are
rejected by name, except fields that cannot change a token; tests/unit/gateways/smg lists the
exceptions.
"""

from collections.abc import Callable, Mapping
from typing import Final

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.server.front.errors import invalid_field, unsupported_feature
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2

UNSUPPORTED_FIELDS: Final[Mapping[str, str]] = {
    "kv_transfer_params": "kv_transfer",
    "kv_transfer_params_json": "kv_transfer",
    "mm_inputs": "images",
    "extra_mm_inputs": "images",
    "media_refs": "images",
    "sampling_params.truncate_prompt_tokens": "prompt_truncation",
    "sampling_params.structural_tag": "structural_tag",
}
"""Fields that are rejected if set, with the feature that they would require."""

_ANY_OBJECT: Final = '{"type":"object"}'
_UINT64: Final = (1 << 64) - 1


def penstock_request(message: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Convert a gateway's request to Penstock's message. Raises RequestError: FEATURE_UNSUPPORTED,
    INVALID_ARGUMENT."""
    _reject_unsupported(message)
    own = pb.GenerateRequest()
    if message.request_id:
        own.request_id = message.request_id
    match message.WhichOneof("input"):
        case "tokenized":
            own.token_prompt.ids.MergeFrom(message.tokenized.input_ids)
        case "text":
            own.text_prompt.text = message.text
        case _:
            raise invalid_field("input", "one of tokenized and text is required")
    params = message.sampling_params
    _map_sampling(params, own)
    _map_stopping(params, own)
    _map_output(params, own)
    kind = params.WhichOneof("constraint")
    if kind is not None:
        constraint = options_pb2.OutputConstraint()
        _CONSTRAINTS[kind](params, constraint)
        if constraint.WhichOneof("kind") is not None:
            own.constraint.CopyFrom(constraint)
    return own


def _reject_unsupported(message: vllm.GenerateRequest) -> None:
    present = {field.name for field, _ in message.ListFields()}
    present |= {
        f"sampling_params.{field.name}" for field, _ in message.sampling_params.ListFields()
    }
    for path, feature in UNSUPPORTED_FIELDS.items():
        if path in present:
            raise unsupported_feature(feature, path)
    if message.data_parallel_rank != 0:
        raise invalid_field("data_parallel_rank", "must be 0 or unset: there is one rank")


def _map_sampling(params: vllm.SamplingParams, own: pb.GenerateRequest) -> None:
    """Map sampling options. A field that has no presence (proto3) and is 0 is treated as unset,
    because 0 is either invalid or the default.

    Raises RequestError for a negative token id.
    """
    sampling = own.sampling
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if value := getattr(params, name):
            setattr(sampling, name, value)
    if params.n:
        sampling.num_outputs = params.n
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(params, name):
            setattr(sampling, name, value)
    if params.HasField("seed"):
        # Any integer is a valid seed, including negative ones.
        sampling.seed = params.seed & _UINT64
    for token_id, bias in sorted(params.logit_bias.items()):
        if token_id < 0:
            path = f"sampling_params.logit_bias[{token_id}].key"
            raise invalid_field(path, "token ids are 0 or more")
        sampling.logit_bias.add(token_id=token_id, bias=bias)


def _map_stopping(params: vllm.SamplingParams, own: pb.GenerateRequest) -> None:
    stopping = own.stopping
    if params.HasField("max_tokens"):
        stopping.max_tokens = params.max_tokens
    if params.min_tokens:
        stopping.min_tokens = params.min_tokens
    stopping.stop_strings.extend(params.stop)
    stopping.stop_token_ids.extend(params.stop_token_ids)
    stopping.ignore_eos = params.ignore_eos
    stopping.include_stop_string = params.include_stop_str_in_output


def _map_output(params: vllm.SamplingParams, own: pb.GenerateRequest) -> None:
    own.output.return_token_ids = True
    for name in ("logprobs", "prompt_logprobs"):
        if not params.HasField(name):
            continue
        value: int = getattr(params, name)
        if value < 0:
            raise invalid_field(f"sampling_params.{name}", "must be 0 or more")
        setattr(own.output, name, value)


def _map_schema(params: vllm.SamplingParams, constraint: options_pb2.OutputConstraint) -> None:
    constraint.json_schema.CopyFrom(options_pb2.JsonSchemaConstraint(schema=params.json_schema))


def _map_regex(params: vllm.SamplingParams, constraint: options_pb2.OutputConstraint) -> None:
    constraint.regex.CopyFrom(options_pb2.RegexConstraint(pattern=params.regex))


def _map_grammar(params: vllm.SamplingParams, constraint: options_pb2.OutputConstraint) -> None:
    constraint.grammar.CopyFrom(options_pb2.GrammarConstraint(ebnf=params.grammar))


def _map_choice(params: vllm.SamplingParams, constraint: options_pb2.OutputConstraint) -> None:
    constraint.choice.CopyFrom(options_pb2.ChoiceConstraint(choices=params.choice.choices))


def _map_any_object(params: vllm.SamplingParams, constraint: options_pb2.OutputConstraint) -> None:
    if params.json_object:
        constraint.json_schema.CopyFrom(options_pb2.JsonSchemaConstraint(schema=_ANY_OBJECT))


_CONSTRAINTS: Final[
    Mapping[str, Callable[[vllm.SamplingParams, options_pb2.OutputConstraint], None]]
] = {
    "json_schema": _map_schema,
    "regex": _map_regex,
    "grammar": _map_grammar,
    "choice": _map_choice,
    "json_object": _map_any_object,
}
