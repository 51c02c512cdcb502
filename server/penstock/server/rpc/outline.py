"""Sizes of a large message's chat prompt, checked before the message is read.

protobuf takes up to 60 ns for each message within a message, and a Struct takes more to convert:
megabytes of small ones would block the event loop for hundreds of milliseconds. In the outline of a
message type, those of `_OPAQUE` are bytes: the same data is read in a fraction of the time, with
the sizes of what it leaves unread.
"""

from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct

from penstock.server.front.errors import Refusal, RequestError, refuse_field
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
