"""Bytes to protobuf messages, with errors that describe what is wrong with the bytes.

Owns the handling of malformed input. gRPC's own deserialisers would return UNKNOWN and show class
names; here the handler parses.
"""

from collections.abc import Iterator
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.server.front.errors import (
    ErrorReason,
    Refusal,
    RequestError,
    refuse,
    refuse_field,
)
from penstock.server.rpc.outline import parse_outline

M = TypeVar("M", bound=Message)
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
