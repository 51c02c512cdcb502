"""Bytes to protobuf messages, with errors that describe what is wrong with the bytes.

Owns the handling of malformed input, for which gRPC's own deserialisers would return UNKNOWN and
show class names, and the bounds on a chat prompt that are checked before its message is read.
protobuf takes up to 60 ns for each message within a message, and a Struct takes more to convert:
megabytes of small ones would block the event loop for hundreds of milliseconds. In the outline of
a message type, those of `_OPAQUE` are bytes: the same data is read in a fraction of the time, with
the sizes of what it leaves unread.

"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.server.front.errors import (
    ErrorReason,
    Refusal,
    RequestError,
    refuse,
    refuse_field,
)
from penstock.v1 import prompt_pb2 as pb

M = TypeVar("M", bound=Message)

MAX_DATA_BYTES: Final = 128 << 10
"""Of tools, tool calls and template arguments, as encoded. Reading them takes the event loop up to
0.13 ms per KiB, and is not interrupted.
"""
MAX_PARTS: Final = 4096
"""Of all chat messages of a prompt."""
_MAX_MESSAGES: Final = 1 << 16
"""A service allows fewer."""
_CHAT_PROMPT: Final = "chat_prompt"
_OPAQUE: Final = frozenset(
    f".{kind.DESCRIPTOR.full_name}"
    for kind in (pb.ChatMessage, pb.ContentPart, pb.ToolCall, Struct)
)
_MAX_DEPTH = 16
_MAX_FIELDS_EXPLAINED = 10_000
"""Some milliseconds of search; hostile bytes hold millions of fields."""
MAX_UNKNOWN_BYTES = 16 << 10
MAX_UNKNOWN_FIELDS = 1_000
"""Fields that clients of later releases may add; Python takes a second for as many as fit into a
message. The bytes bound the work: fields cannot be counted without listing them all.
"""
_MAX_MESSAGES_SEARCHED = 10_000
_LONG_TEXT = 1024
_MAX_PARTS_CLEARED = 64


def parse_outline(message_type: type[M], data: bytes) -> tuple[M, Refusal] | None:
    """The message without its chat prompt, and the refusal, where that is too large to be read.

    None where it is not, and for data that cannot be parsed.
    """
    if len(data) <= MAX_DATA_BYTES:
        return None
    try:
        outline = _outline_of(message_type.DESCRIPTOR).FromString(data)
        holder = _holder_of_chat(outline)
        if holder is None:
            return None
        try:
            _check_prompt(holder.chat_prompt)
        except RequestError as error:
            holder.ClearField(_CHAT_PROMPT)
            return message_type.FromString(outline.SerializeToString()), error.refusal
    except DecodeError:
        pass
    return None


def _check_prompt(prompt: Any) -> None:
    """`prompt`: the outline of a ChatPrompt."""
    _at_most("chat_prompt.messages", "entries", len(prompt.messages), _MAX_MESSAGES)
    message_type = _outline_of(pb.ChatMessage.DESCRIPTOR)
    num_parts = num_call_bytes = 0
    for data in prompt.messages:
        message: Any = message_type.FromString(data)
        num_parts += len(message.parts)
        num_call_bytes += sum(map(len, message.tool_calls))
    _at_most("chat_prompt.messages.parts", "entries", num_parts, MAX_PARTS)
    sizes = {
        "chat_prompt.tools": sum(map(len, prompt.tools)),
        "chat_prompt.template_arguments": len(prompt.template_arguments),
        "chat_prompt.messages.tool_calls": num_call_bytes,
    }
    _at_most(
        max(sizes, key=sizes.__getitem__),
        "encoded bytes together with the other data of the chat template",
        sum(sizes.values()),
        MAX_DATA_BYTES,
    )


def _at_most(path: str, unit: str, number: int, limit: int) -> None:
    if number > limit:
        raise refuse_field(path, f"has {number} {unit}, at most {limit} are allowed")


def _holder_of_chat(message: Message) -> Any | None:
    """The message within `message` that has the chat prompt as a field."""
    for field, value in message.ListFields():
        if field.name == _CHAT_PROMPT:
            return message
        if isinstance(value, Message) and (found := _holder_of_chat(value)) is not None:
            return found
    return None


@cache
def _outline_of(descriptor: Descriptor) -> type[Message]:
    pool = DescriptorPool()
    _add(descriptor.file, pool, set())
    return GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add(file: FileDescriptor, pool: DescriptorPool, added: set[str]) -> None:
    """The outline of a file, after those that it depends on."""
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(dependency, pool, added)
    outline = FileDescriptorProto()
    file.CopyToProto(outline)
    for message in outline.message_type:
        _make_opaque(message)
    pool.AddSerializedFile(outline.SerializeToString())


def _make_opaque(message: DescriptorProto) -> None:
    for nested in message.nested_type:
        _make_opaque(nested)
    for field in message.field:
        if field.type_name in _OPAQUE:
            field.type = FieldDescriptorProto.TYPE_BYTES
            field.ClearField("type_name")


def parse(message_type: type[M], data: bytes) -> M:
    """Parse `data`; raises RequestError MALFORMED_REQUEST, naming a string that is not UTF-8."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        pass
    raise _explain(cast(Descriptor, message_type.DESCRIPTOR), data)


def parse_request(message_type: type[M], data: bytes) -> tuple[M, Refusal | None]:
    """Parse a message that may hold a chat prompt; without it, and with the refusal, where that is
    too large to be read. Raises as `parse` does.
    """
    return parse_outline(message_type, data) or (parse(message_type, data), None)


def num_unknown_fields(message: Message) -> int:
    """Fields that this build does not know, at any depth: ignored but counted.

    For a message that is within its bounds and was read: its lists of numbers, long texts and
    unknown fields are cleared. Raises RequestError MALFORMED_REQUEST when there are more than a
    later release could add.
    """
    _drop_long_values(message)
    encoded = message.SerializeToString()
    message.DiscardUnknownFields()
    num_bytes = len(encoded) - message.ByteSize()
    if not num_bytes:
        return 0
    if num_bytes > MAX_UNKNOWN_BYTES:
        raise _too_much_unknown(f"{num_bytes} bytes", f"{MAX_UNKNOWN_BYTES} bytes")
    num_fields = 0
    left = [type(message).FromString(encoded)]
    for _ in range(_MAX_MESSAGES_SEARCHED):
        if not left:
            break
        searched = left.pop()
        num_fields += len(UnknownFieldSet(searched))
        for descriptor, value in searched.ListFields():
            kind = descriptor.message_type
            # The maps that are read have plain values; their entries keep no unknown fields.
            if kind is not None and not kind.GetOptions().map_entry:
                left.extend(value if is_repeated(descriptor) else (value,))
    if num_fields > MAX_UNKNOWN_FIELDS:
        raise _too_much_unknown(f"{num_fields}", f"{MAX_UNKNOWN_FIELDS}")
    return num_fields


def _drop_long_values(message: Message) -> None:
    """Clear the lists of numbers and the long texts of a message: serialising them takes time."""
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            parts = value if is_repeated(descriptor) else (value,)
            if (
                len(parts) <= _MAX_PARTS_CLEARED
                and not descriptor.message_type.GetOptions().map_entry
            ):
                for part in parts:
                    _drop_long_values(part)
        elif is_repeated(descriptor):
            if descriptor.cpp_type != FieldDescriptor.CPPTYPE_STRING:
                message.ClearField(descriptor.name)
        elif descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING and len(value) > _LONG_TEXT:
            message.ClearField(descriptor.name)


def _too_much_unknown(found: str, allowed: str) -> RequestError:
    message = f"the request has {found} of unknown fields, at most {allowed} are ignored"
    return RequestError(Refusal(reason=ErrorReason.MALFORMED_REQUEST, message=message))


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field is repeated; older releases of protobuf lack the property."""
    return isinstance(field.default_value, list)


def _explain(descriptor: Descriptor, data: bytes) -> RequestError:
    try:
        budget = iter(range(_MAX_FIELDS_EXPLAINED))
        path = next(_invalid_strings(descriptor, data, "", budget), None)
    except ValueError:
        path = None
    if path is None:
        return refuse(ErrorReason.MALFORMED_REQUEST)
    return refuse_field(path, "is not valid UTF-8", ErrorReason.MALFORMED_REQUEST)


def _invalid_strings(
    descriptor: Descriptor, data: bytes, prefix: str, budget: Iterator[int], depth: int = 0
) -> Iterator[str]:
    """Paths of strings that are not UTF-8, up to where the wire format breaks (ValueError).

    Visits no more fields than `budget` has items.
    """
    seen: dict[int, int] = {}
    for (number, value), _ in zip(_fields(data), budget, strict=False):
        field = descriptor.fields_by_number.get(number)
        if field is None or value is None:
            continue
        index = seen.get(number, 0)
        seen[number] = index + 1
        path = f"{prefix}{field.name}[{index}]" if is_repeated(field) else f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode()
            except UnicodeDecodeError:
                yield path
        elif field.message_type is not None and depth < _MAX_DEPTH:
            yield from _invalid_strings(field.message_type, value, f"{path}.", budget, depth + 1)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Field numbers with the bytes of length-delimited fields, None for the others."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value: bytes | None = None
        match tag & 7:
            case 0:
                _, position = _varint(data, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(data, position)
                value = data[position : position + length]
                position += length
            case 5:
                position += 4
            case _:
                raise ValueError("unknown wire type")
        if position > len(data):
            raise ValueError("truncated")
        yield tag >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("truncated")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
    raise ValueError("varint too long")
