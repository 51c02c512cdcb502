"""Converts Python values to protobuf messages.

A value that does not fit its protobuf field raises an error that begins with the keyword of an
option, such as `n`, or, for a part of the prompt, with the path of its protobuf field. The server
checks ranges.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast, get_args

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

import penstock.v1 as pb
from penstock.client.argument_types import require_type
from penstock.client.options import (
    GROUPS,
    Adapter,
    ChoiceConstraint,
    Constraint,
    GenerationRequest,
    GrammarConstraint,
    JsonSchemaConstraint,
    OutputOptions,
    RegexConstraint,
)
from penstock.client.prompt import (
    ChatPrompt,
    Image,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    as_message,
)

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
_POSITIVE: Final = {"max_tokens", "min_chunk_tokens", "num_outputs", "top_k", "window_tokens"}
"""Unsigned fields that the server requires to be at least 1."""
_GROUPS: Final = ("sampling", "stopping", "output", "scheduling", "cache")
MessageT = TypeVar("MessageT", bound=Message)
_LISTS: Final = (tuple, list)
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
    """Return the protobuf message of a generation request.

    Raises ValueError or TypeError, naming the field, if one does not fit.
    """
    message = pb.GenerateRequest()
    _set(message, "model", request.model, "model")
    _set(message, "request_id", request.request_id, "request_id")
    encode_prompt(request.prompt, message)
    try:
        _encode_sampling(request, message.sampling)
        _encode_stopping(request, message.stopping)
        _encode_output(request.output, message.output)
        _encode_scheduling(request, message.scheduling)
        _encode_cache(request, message.cache)
    except AttributeError:
        for name in _GROUPS:
            require_type(getattr(request, name), name, GROUPS[name])
        raise
    if request.constraint is not None:
        _encode_constraint(request.constraint, message.constraint)
    if request.adapter is not None:
        require_type(request.adapter, "adapter", Adapter)
        _set(message.adapter, "name", request.adapter.name, "adapter.name")
        _set(message.adapter, "scale", request.adapter.scale, "adapter.scale")
    _set_duration(message, "resume_timeout", request.resume_timeout_s, "resume_timeout_s")
    _clear_unused_groups(message)
    return message


def filled(message: MessageT, **values: Any) -> MessageT:
    """Set scalar fields of the message to `values`, except those that are None, and return the
    message.

    Raises ValueError, naming the field, if one does not fit.
    """
    for name, value in values.items():
        _set(message, name, value, name)
    return message


def encode_prompt(prompt: Prompt, message: pb.GenerateRequest | pb.TokenizeRequest) -> None:
    """Write the prompt into the message.

    Raises ValueError or TypeError, naming the field, if one does not fit. Raises ValueError for
    token ids in a TokenizeRequest, because there is nothing to tokenize.
    """
    if isinstance(prompt, TextPrompt):
        text = message.text_prompt
        text.SetInParent()
        _set_prompt(text, "text", prompt.text, "text_prompt.text")
        _set(text, "add_special_tokens", prompt.add_special_tokens, "text_prompt")
    elif isinstance(prompt, ChatPrompt):
        _encode_chat(prompt, message.chat_prompt)
    else:
        require_type(prompt, "prompt", TextPrompt, ChatPrompt, TokenPrompt)
        if isinstance(message, pb.TokenizeRequest):
            raise ValueError("prompt: token ids are tokenised already")
        message.token_prompt.SetInParent()
        _extend(message.token_prompt.ids, prompt.ids, "token_prompt.ids")


def _encode_chat(prompt: ChatPrompt, message: pb.ChatPrompt) -> None:
    message.SetInParent()
    for index, item in enumerate(_items(prompt.messages, "chat_prompt.messages")):
        path = f"chat_prompt.messages[{index}]"
        turn = as_message(item, path)
        encoded = message.messages.add()
        _set(encoded, "role", turn.role, f"{path}.role")
        _set(encoded, "name", turn.name, f"{path}.name")
        _set(encoded, "tool_call_id", turn.tool_call_id, f"{path}.tool_call_id")
        if isinstance(turn.content, str):
            parts: Iterable[str | Image] = (turn.content,)
        else:
            parts = _items(turn.content, f"{path}.content", "a str or a list")
        for number, part in enumerate(parts):
            part_path = f"{path}.parts[{number}]"
            if isinstance(part, str):
                _set_prompt(encoded.parts.add(), "text", part, f"{part_path}.text")
            else:
                require_type(part, part_path, str, Image)
                image = encoded.parts.add().image
                _set(image, "data", part.data, f"{part_path}.image.data")
                _set(image, "mime_type", part.mime_type, f"{part_path}.image.mime_type")
        calls = _items(turn.tool_calls, f"{path}.tool_calls") if turn.tool_calls else ()
        for number, call in enumerate(calls):
            call_path = f"{path}.tool_calls[{number}]"
            require_type(call, call_path, ToolCall)
            call_message = encoded.tool_calls.add()
            _set(call_message, "id", call.id, f"{call_path}.id")
            _set(call_message, "name", call.name, f"{call_path}.name")
            _set_struct(call_message.arguments, call.arguments, f"{call_path}.arguments")
    _set(message, "add_generation_prompt", prompt.add_generation_prompt, "chat_prompt")
    _set(message, "window_tokens", prompt.window_tokens, "chat_prompt.window_tokens")
    for index, tool in enumerate(_items(prompt.tools, "chat_prompt.tools")):
        _set_struct(message.tools.add(), tool, f"chat_prompt.tools[{index}]")
    if prompt.template_arguments:
        path = "chat_prompt.template_arguments"
        _set_struct(message.template_arguments, prompt.template_arguments, path)


def _set_struct(message: Struct, values: Mapping[str, Any], path: str) -> None:
    """Write `values` to `message`. Raises TypeError if they are not a mapping, and ValueError for a
    value that JSON cannot represent."""
    require_type(values, path, Mapping)
    try:
        ParseDict(dict(values), message)
    except ParseError:
        raise ValueError(f"{path}: must contain only JSON values") from None


def encode_ids(ids: Sequence[int], message: pb.DetokenizeRequest) -> None:
    """Write the token ids into the message. Raises ValueError or TypeError, naming the id, if one
    does not fit."""
    _extend(message.token_ids, ids, "token_ids")


def _encode_sampling(request: GenerationRequest, message: pb.SamplingOptions) -> None:
    for name in _SAMPLING_SCALARS:
        _set(message, name, getattr(request.sampling, name), name)
    _set(message, "num_outputs", request.sampling.n, "n")
    for index, pair in enumerate(_items(request.sampling.logit_bias, "logit_bias")):
        path = f"logit_bias[{index}]"
        try:
            token_id, bias = pair
        except (TypeError, ValueError):
            raise TypeError(f"{path}: must be a token id and its bias") from None
        entry = message.logit_bias.add()
        _set(entry, "token_id", token_id, f"{path}.token_id")
        _set(entry, "bias", bias, f"{path}.bias")


def _encode_stopping(request: GenerationRequest, message: pb.StoppingOptions) -> None:
    options = request.stopping
    for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop_string"):
        _set(message, name, getattr(options, name), name)
    _extend(message.stop_strings, options.stop, "stop")
    _extend(message.stop_token_ids, options.stop_token_ids, "stop_token_ids")


def _encode_output(options: OutputOptions, message: pb.OutputOptions) -> None:
    for name in ("logprobs", "prompt_logprobs", "return_token_ids", "echo", "min_chunk_tokens"):
        _set(message, name, getattr(options, name), name)
    _set_duration(message, "max_chunk_delay", options.max_chunk_delay_s, "max_chunk_delay_s")


def _encode_scheduling(request: GenerationRequest, message: pb.SchedulingOptions) -> None:
    options = request.scheduling
    _set(message, "priority", options.priority, "priority")
    for name in ("ttft_timeout", "total_timeout", "time_limit"):
        _set_duration(message, name, getattr(options, f"{name}_s"), f"{name}_s")


def _encode_cache(request: GenerationRequest, message: pb.CacheOptions) -> None:
    options = request.cache
    _set(message, "salt", options.cache_salt, "cache_salt")
    _set(message, "session_id", options.session_id, "session_id")
    if options.retention_level is not None or options.retention_s is not None:
        _set(message.retention, "level", options.retention_level, "retention_level")
        _set_duration(message.retention, "duration", options.retention_s, "retention_s")
        message.retention.SetInParent()


def _encode_constraint(constraint: Constraint, message: pb.OutputConstraint) -> None:
    require_type(constraint, "constraint", *get_args(Constraint))
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
    """Remove option groups in which no field is set. Such a group may be present, because writing
    False to a field marks its group as present."""
    for name in _GROUPS:
        if not getattr(message, name).ListFields():
            message.ClearField(name)


def _set(message: Message, name: str, value: Any, path: str) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        field: Any = message.DESCRIPTOR.fields_by_name[name]
        raise _invalid_value(value, path, error, field) from None


def _set_prompt(message: Message, name: str, text: Any, path: str) -> None:
    """Set a field like `_set`. The errors do not quote the prompt, because it may be long and
    private."""
    try:
        setattr(message, name, text)
    except UnicodeError:
        raise ValueError(f"{path}: the prompt is not valid UTF-8") from None
    except (TypeError, ValueError):
        kind = type(text).__name__
        raise ValueError(f"{path}: the prompt must be a str, not {kind}") from None


def _items(values: Iterable[Any], path: str, wanted: str = "a list") -> Iterable[Any]:
    if type(values) in _LISTS:  # This avoids the cost of an abstract class.
        return values
    given = cast(object, values)  # Without a type checker, callers may pass values of any type.
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{path}: must be {wanted}, not {type(values).__name__}")
    return values


def _extend(values: Any, items: Sequence[Any], path: str) -> None:
    for index, item in enumerate(_items(items, path)):
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
        low = 1 if field.name in _POSITIVE else low
        bound = f"at least {low}" if value < low else f"at most {high}"
        return ValueError(f"{path}: must be {bound}, not {reprlib.repr(value)}")
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
