"""Converts domain values to protobuf messages.

Owns encoding. Rejects every value that does not fit its field, with the path of the field in the
contract; the server checks ranges.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

import penstock.v1 as pb
from penstock.client.options import (
    ChoiceConstraint,
    Constraint,
    GenerationRequest,
    GrammarConstraint,
    JsonSchemaConstraint,
    OutputOptions,
    RegexConstraint,
)
from penstock.client.prompt import ChatPrompt, Prompt, TextPrompt, as_message

_KINDS: Final = {
    FieldDescriptor.CPPTYPE_INT32: "an int",
    FieldDescriptor.CPPTYPE_INT64: "an int",
    FieldDescriptor.CPPTYPE_UINT32: "an int",
    FieldDescriptor.CPPTYPE_UINT64: "an int",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "a bool",
    FieldDescriptor.CPPTYPE_STRING: "a str",
}
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_GROUPS: Final = ("sampling", "stopping", "output", "scheduling", "cache")
_SAMPLING_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def encode_request(request: GenerationRequest) -> pb.GenerateRequest:
    """Make the message of a generation. Raises ValueError naming a field that does not fit."""
    message = pb.GenerateRequest()
    _set(message, "model", request.model, "model")
    _set(message, "request_id", request.request_id, "request_id")
    encode_prompt(request.prompt, message)
    _encode_sampling(request, message.sampling)
    _encode_stopping(request, message.stopping)
    _encode_output(request.output, message.output)
    _encode_scheduling(request, message.scheduling)
    _encode_cache(request, message.cache)
    if request.constraint is not None:
        _encode_constraint(request.constraint, message.constraint)
    if request.adapter is not None:
        _set(message.adapter, "name", request.adapter.name, "adapter.name")
        _set(message.adapter, "scale", request.adapter.scale, "adapter.scale")
    grace_s = request.resume_grace_s
    _set_duration(message, "resume_timeout", grace_s, "resume_timeout")
    _clear_unused_groups(message)
    return message


def encode_prompt(prompt: Prompt, message: pb.GenerateRequest | pb.TokenizeRequest) -> None:
    """Write the prompt into the message.

    Raises ValueError for token ids in a TokenizeRequest: there is nothing to tokenize.
    """
    if isinstance(prompt, TextPrompt):
        text = message.text_prompt
        text.SetInParent()
        _set_prompt(text, "text", prompt.text, "text_prompt.text")
        _set(text, "add_special_tokens", prompt.add_special_tokens, "text_prompt")
    elif isinstance(prompt, ChatPrompt):
        _encode_chat(prompt, message.chat_prompt)
    elif isinstance(message, pb.TokenizeRequest):
        raise ValueError("prompt: token ids are tokenised already")
    else:
        message.token_prompt.SetInParent()
        _extend(message.token_prompt.ids, prompt.ids, "token_prompt.ids")


def _encode_chat(prompt: ChatPrompt, message: pb.ChatPrompt) -> None:
    message.SetInParent()
    for index, item in enumerate(prompt.messages):
        path = f"chat_prompt.messages[{index}]"
        turn = as_message(item, path)
        encoded = message.messages.add()
        _set(encoded, "role", turn.role, f"{path}.role")
        _set(encoded, "name", turn.name, f"{path}.name")
        _set(encoded, "tool_call_id", turn.tool_call_id, f"{path}.tool_call_id")
        parts = (turn.content,) if isinstance(turn.content, str) else turn.content
        for number, part in enumerate(parts):
            part_path = f"{path}.parts[{number}]"
            if isinstance(part, str):
                _set_prompt(encoded.parts.add(), "text", part, f"{part_path}.text")
            else:
                image = encoded.parts.add().image
                _set(image, "data", part.data, f"{part_path}.image.data")
                _set(image, "mime_type", part.mime_type, f"{part_path}.image.mime_type")
        for number, call in enumerate(turn.tool_calls):
            call_path = f"{path}.tool_calls[{number}]"
            call_message = encoded.tool_calls.add()
            _set(call_message, "id", call.id, f"{call_path}.id")
            _set(call_message, "name", call.name, f"{call_path}.name")
            _set_struct(call_message.arguments, call.arguments, f"{call_path}.arguments")
    _set(message, "add_generation_prompt", prompt.add_generation_prompt, "chat_prompt")
    _set(message, "window_tokens", prompt.window_tokens, "chat_prompt.window_tokens")
    for index, tool in enumerate(prompt.tools):
        _set_struct(message.tools.add(), tool, f"chat_prompt.tools[{index}]")
    if prompt.template_arguments:
        path = "chat_prompt.template_arguments"
        _set_struct(message.template_arguments, prompt.template_arguments, path)


def _set_struct(message: Struct, values: Mapping[str, Any], path: str) -> None:
    """Set the values. Raises ValueError for a value that JSON cannot represent."""
    try:
        ParseDict(dict(values), message)
    except ParseError:
        raise ValueError(f"{path}: must hold nothing but what JSON can") from None


def encode_ids(ids: Sequence[int], message: pb.DetokenizeRequest) -> None:
    """Write the token ids to detokenize."""
    _extend(message.token_ids, tuple(ids), "token_ids")


def _encode_sampling(request: GenerationRequest, message: pb.SamplingOptions) -> None:
    for name in _SAMPLING_SCALARS:
        _set(message, name, getattr(request.sampling, name), f"sampling.{name}")
    _set(message, "num_outputs", request.sampling.n, "sampling.num_outputs")
    for index, (token_id, bias) in enumerate(request.sampling.logit_bias):
        entry = message.logit_bias.add()
        _set(entry, "token_id", token_id, f"sampling.logit_bias[{index}].token_id")
        _set(entry, "bias", bias, f"sampling.logit_bias[{index}].bias")


def _encode_stopping(request: GenerationRequest, message: pb.StoppingOptions) -> None:
    options = request.stopping
    for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop_string"):
        _set(message, name, getattr(options, name), f"stopping.{name}")
    _extend(message.stop_strings, options.stop, "stopping.stop_strings")
    _extend(message.stop_token_ids, options.stop_token_ids, "stopping.stop_token_ids")


def _encode_output(options: OutputOptions, message: pb.OutputOptions) -> None:
    for name in ("logprobs", "prompt_logprobs", "return_token_ids", "echo", "min_chunk_tokens"):
        _set(message, name, getattr(options, name), f"output.{name}")
    _set_duration(message, "max_chunk_delay", options.max_chunk_delay_s, "output.max_chunk_delay")


def _encode_scheduling(request: GenerationRequest, message: pb.SchedulingOptions) -> None:
    options = request.scheduling
    _set(message, "priority", options.priority, "scheduling.priority")
    for name in ("ttft_timeout", "total_timeout", "time_limit"):
        _set_duration(message, name, getattr(options, f"{name}_s"), f"scheduling.{name}")


def _encode_cache(request: GenerationRequest, message: pb.CacheOptions) -> None:
    options = request.cache
    _set(message, "salt", options.cache_salt, "cache.salt")
    _set(message, "session_id", options.session_id, "cache.session_id")
    if options.retention_level is not None or options.retention_s is not None:
        path = "cache.retention"
        _set(message.retention, "level", options.retention_level, f"{path}.level")
        _set_duration(message.retention, "duration", options.retention_s, f"{path}.duration")
        message.retention.SetInParent()


def _encode_constraint(constraint: Constraint, message: pb.OutputConstraint) -> None:
    match constraint:
        case JsonSchemaConstraint():
            message.json_schema.SetInParent()
            _set(message.json_schema, "schema", constraint.schema, "constraint.json_schema.schema")
        case RegexConstraint():
            message.regex.SetInParent()
            _set(message.regex, "pattern", constraint.pattern, "constraint.regex.pattern")
        case GrammarConstraint():
            message.grammar.SetInParent()
            _set(message.grammar, "ebnf", constraint.ebnf, "constraint.grammar.ebnf")
        case ChoiceConstraint():
            message.choice.SetInParent()
            _extend(message.choice.choices, constraint.choices, "constraint.choice.choices")


def _clear_unused_groups(message: pb.GenerateRequest) -> None:
    """Remove groups in which no field is set: accessing a group marks it as present."""
    for name in _GROUPS:
        if not getattr(message, name).ListFields():
            message.ClearField(name)


def _set(message: Message, name: str, value: Any, path: str) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        field: Any = message.DESCRIPTOR.fields_by_name[name]
        raise _invalid_value(value, path, error, field) from None


def _set_prompt(message: Message, name: str, text: Any, path: str) -> None:
    """Set a field like `_set`; errors do not quote prompts, which may be long and private."""
    try:
        setattr(message, name, text)
    except UnicodeError:
        raise ValueError(f"{path}: the prompt is not valid UTF-8") from None
    except (TypeError, ValueError):
        kind = type(text).__name__
        raise ValueError(f"{path}: the prompt must be a str, not {kind}") from None


def _extend(values: Any, items: Sequence[Any], path: str) -> None:
    for index, item in enumerate(items):
        try:
            values.append(item)
        except (TypeError, ValueError) as error:
            raise _invalid_value(item, f"{path}[{index}]", error) from None


def _invalid_value(
    value: Any, path: str, error: Exception, field: FieldDescriptor | None = None
) -> ValueError:
    if isinstance(error, UnicodeError):
        return ValueError(f"{path}: is not valid UTF-8")
    if isinstance(error, ValueError) and field is not None and field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return ValueError(f"{path}: must be from {low} to {high}, not {reprlib.repr(value)}")
    if isinstance(error, TypeError) and field is not None:
        wanted = _KINDS.get(field.cpp_type, "a value of another type")
        kind = type(value).__name__
        return ValueError(f"{path}: must be {wanted}, not the {kind} {reprlib.repr(value)}")
    return ValueError(f"{path}: {reprlib.repr(value)} does not fit: {error}")


def _set_duration(message: Message, name: str, seconds: float | None, path: str) -> None:
    if seconds is None:
        return
    duration = Duration()
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {seconds!r} s does not fit: {error}") from None
    getattr(message, name).CopyFrom(duration)
