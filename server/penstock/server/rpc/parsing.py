"""Parses bytes to protobuf messages, with errors that describe what is wrong with the bytes.

For malformed input gRPC's own deserialisers would return UNKNOWN and reveal names of classes. The
limits on the content of a message are checked before it is parsed: protobuf takes up to 100 ns for
each field, and a Struct takes longer to convert, so megabytes of small fields would block the event
loop for hundreds of milliseconds. Therefore the fields of a large message are first counted in the
encoded bytes.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.server.front.errors import (
    ErrorReason,
    Failure,
    RequestError,
    invalid_field,
    request_error,
)
from penstock.server.rpc.mapping_out import varint
from penstock.v1 import prompt_pb2 as pb
from penstock.v1.generation_service_pb2 import GenerateRequest, MultiplexSubmit

M = TypeVar("M", bound=Message)

MAX_DATA_BYTES: Final = 128 << 10
"""Maximum encoded bytes of tools, tool calls and template arguments together."""
MAX_PARTS: Final = 4096
"""Maximum number of parts of all chat messages of a prompt."""
_MAX_FIELDS: Final = 1 << 13
"""Maximum number of fields of a large message, without those inside small parts of chat messages.
Counting one takes a microsecond."""
_MAX_NUMBERS: Final = 1 << 20
"""Maximum length of a packed list of numbers. Reading one number takes 9 ns."""
_LARGE_BYTES: Final = 64 << 10
"""The fields of messages up to this size are not counted."""
_MAX_SHORT_FIELDS: Final = 64
_MAX_SHORT_BYTES: Final = 1024
"""Longer fields of a rejected message are dropped, and so are all after the first
`_MAX_SHORT_FIELDS`."""
_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_MAX_DEPTH = 16
_MAX_FIELDS_EXPLAINED = 1_000
"""Maximum number of fields searched for the malformed one, which takes some milliseconds. Malicious
bytes may have millions of fields."""
MAX_UNKNOWN_BYTES = 16 << 10
MAX_UNKNOWN_FIELDS = 1_000
"""Maximum number of unknown fields of a message. Clients of later releases may add some.

They can only be counted by listing them, and listing all that fit into a message would take a
second, so their bytes are limited too.
"""
_MAX_MESSAGES_SEARCHED = 10_000
_LONG_TEXT = 1024
_LONG_MESSAGE = 4096
"""Messages of up to this many bytes are serialised unchanged, within some microseconds."""
_MAX_PARTS_CLEARED = 64


def parse(message_type: type[M], data: bytes) -> M:
    """Return `data` parsed as a `message_type`.

    Raises RequestError: INVALID_ARGUMENT if a limit is exceeded; MALFORMED_REQUEST if the bytes are
    invalid, with the path of the field if it is a string that is not UTF-8.
    """
    _check_counts(message_type, data)
    return _read(message_type, data)


def parse_request(message_type: type[M], data: bytes) -> tuple[M, Failure | None]:
    """Return the parsed message of a request, and the error if it exceeds a limit, otherwise None.

    If a limit is exceeded, the returned message has only the short fields, such as the request id.
    Raises RequestError, as `parse` does, if the message is malformed.
    """
    try:
        _check_counts(message_type, data)
    except RequestError as error:
        try:
            short = _short_fields(cast(Descriptor, message_type.DESCRIPTOR), data)
        except (IndexError, ValueError):
            raise error from None
        return _read(message_type, short), error.failure
    return _read(message_type, data), None


def _read(message_type: type[M], data: bytes) -> M:
    try:
        return message_type.FromString(data)
    except DecodeError:
        pass
    raise _explain(cast(Descriptor, message_type.DESCRIPTOR), data)


def _check_counts(message_type: type[Message], data: bytes) -> None:
    if len(data) > _LARGE_BYTES:
        # The parser reports malformed messages.
        with contextlib.suppress(IndexError, ValueError):
            _FieldCount(data).check(cast(Descriptor, message_type.DESCRIPTOR))


class _FieldCount:
    """Counts the fields of an encoded message and checks the limits on its content.

    Raises RequestError if a limit is exceeded, and IndexError or ValueError if the wire format is
    invalid.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0
        self._num_of: dict[str, int] = {}
        self._data_bytes: dict[str, int] = {}

    def check(self, descriptor: Descriptor) -> None:
        """Count the fields, numbers and parts of the whole message, and check the limits."""
        self._check(descriptor, 0, len(self._data), "")

    def _check(self, descriptor: Descriptor, start: int, end: int, prefix: str) -> None:
        kinds = _kinds_of(descriptor)
        for number, begin, stop in _spans(self._data, start, end):
            kind = kinds.get(number, _PLAIN)
            path = f"{prefix}{kind.name}"
            self._num_of[path] = num = self._num_of.get(path, 0) + 1
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                raise self._too_many_fields()
            if begin < 0:
                continue
            if begin == stop and not kind.is_part:
                continue
            if kind.is_part:
                _at_most(path, "entries", num, MAX_PARTS)
            if kind.is_data:
                self._count_data(path, stop - begin)
            elif kind.inner is not None and (not kind.is_part or stop - begin > _LARGE_BYTES):
                inner = "" if kind.is_request else f"{path}."
                self._check(kind.inner, begin, stop, inner)
            elif kind.is_numbers:
                numbers = np.frombuffer(self._data, np.uint8, stop - begin, begin)
                _at_most(path, "entries", int(np.count_nonzero(numbers < 0x80)), _MAX_NUMBERS)

    def _count_data(self, path: str, num_bytes: int) -> None:
        sizes = self._data_bytes
        sizes[path] = sizes.get(path, 0) + num_bytes
        _at_most(
            max(sizes, key=sizes.__getitem__),
            "encoded bytes or more together with the other data of the chat template",
            sum(sizes.values()),
            MAX_DATA_BYTES,
        )

    def _too_many_fields(self) -> RequestError:
        path = max(self._num_of, key=self._num_of.__getitem__)
        num = self._num_of[path]
        return invalid_field(
            path, f"has {num} entries or more, a request may have {_MAX_FIELDS} fields in all"
        )


def _at_most(path: str, unit: str, number: int, limit: int) -> None:
    if number > limit:
        raise invalid_field(path, f"has {number} {unit}, at most {limit} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The type of a field. `inner` is its message type; None if the field is not a message.

    `is_request` is True for a GenerateRequest, and `is_part` for a ContentPart of a chat message.
    `is_data` is True for tools, tool calls and template arguments: their bytes are counted instead
    of their fields. `is_numbers` is True for a repeated number.
    """

    name: str = "unknown"
    inner: Descriptor | None = None
    is_request: bool = False
    is_part: bool = False
    is_data: bool = False
    is_numbers: bool = False


_PLAIN: Final = _Kind()


@cache
def _kinds_of(descriptor: Descriptor) -> dict[int, _Kind]:
    return {field.number: _kind_of(field) for field in descriptor.fields}


def _kind_of(field: FieldDescriptor) -> _Kind:
    inner = field.message_type
    name = "" if inner is None else inner.full_name
    is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
    return _Kind(
        name=field.name,
        inner=inner,
        is_request=name == GenerateRequest.DESCRIPTOR.full_name,
        is_part=name == pb.ContentPart.DESCRIPTOR.full_name,
        is_data=name in (Struct.DESCRIPTOR.full_name, pb.ToolCall.DESCRIPTOR.full_name),
        is_numbers=inner is None and not is_text and is_repeated(field),
    )


def _short_fields(descriptor: Descriptor, data: bytes) -> bytes:
    """Return the first `_MAX_SHORT_FIELDS` fields of an encoded message, without fields longer than
    `_MAX_SHORT_BYTES`. A long field that contains the request is kept, but reduced in the same way.
    Raises IndexError or ValueError if the wire format is invalid."""
    holders = (GenerateRequest.DESCRIPTOR, MultiplexSubmit.DESCRIPTOR)
    kept = bytearray()
    begun = 0
    for (number, begin, stop), _ in zip(
        _spans(data, 0, len(data)), range(_MAX_SHORT_FIELDS), strict=False
    ):
        kind = _kinds_of(descriptor).get(number, _PLAIN)
        if begin < 0 or stop - begin <= _MAX_SHORT_BYTES:
            kept += data[begun:stop]
        elif kind.inner is not None and kind.inner in holders:
            inner = _short_fields(kind.inner, data[begin:stop])
            kept += varint(number << 3 | _DELIMITED) + varint(len(inner)) + inner
        begun = stop
    return bytes(kept)


def num_unknown_fields(message: Message) -> int:
    """Return the number of fields, at any depth, that this release does not know and ignores.

    Call this after the message was checked and read, because it clears the unknown fields, and in a
    large message also lists of numbers and long texts. Raises RequestError (MALFORMED_REQUEST) if
    there are more than MAX_UNKNOWN_FIELDS, or if they have more than MAX_UNKNOWN_BYTES bytes.
    """
    if message.ByteSize() > _LONG_MESSAGE:
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
            # The maps that are read have plain values, and their entries have no unknown fields.
            if kind is not None and not kind.GetOptions().map_entry:
                left.extend(value if is_repeated(descriptor) else (value,))
    if num_fields > MAX_UNKNOWN_FIELDS:
        raise _too_much_unknown(f"{num_fields}", f"{MAX_UNKNOWN_FIELDS}")
    return num_fields


def _drop_long_values(message: Message) -> None:
    """Clear the lists of numbers and the long texts of a message and of its nested messages,
    because serialising them would take long. Lists of more than `_MAX_PARTS_CLEARED` messages are
    left unchanged."""
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
    return RequestError(Failure(reason=ErrorReason.MALFORMED_REQUEST, message=message))


def is_repeated(field: FieldDescriptor) -> bool:
    """Return True if a field is repeated. Older releases of protobuf lack the property
    `is_repeated`."""
    return isinstance(field.default_value, list)


def _explain(descriptor: Descriptor, data: bytes) -> RequestError:
    try:
        budget = iter(range(_MAX_FIELDS_EXPLAINED))
        path = next(_invalid_strings(descriptor, data, "", budget), None)
    except (IndexError, ValueError):
        path = None
    if path is None:
        return request_error(ErrorReason.MALFORMED_REQUEST)
    return invalid_field(path, "is not valid UTF-8", ErrorReason.MALFORMED_REQUEST)


def _invalid_strings(
    descriptor: Descriptor, data: bytes, prefix: str, budget: Iterator[int], depth: int = 0
) -> Iterator[str]:
    """Yield the paths of strings that are not UTF-8. Raises IndexError or ValueError if the wire
    format is invalid.

    Each visited field takes an item from `budget`; the search stops when no item is left.
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
    """Yield the number of each field, with its bytes if it is length-delimited, otherwise with
    None."""
    for number, begin, stop in _spans(data, 0, len(data)):
        yield number, None if begin < 0 else data[begin:stop]


def _spans(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """For each field from `position` to `end`, yield its number, the start of its content (-1 if
    it is not length-delimited), and its end. Raises IndexError or ValueError if the wire format is
    invalid."""
    while position < end:
        tag, position = _varint(data, position)
        wire, begin = tag & 7, -1
        if wire == _DELIMITED:
            length, begin = _varint(data, position)
            position = begin + length
        elif wire == 0:
            _, position = _varint(data, position)
        elif wire in _FIXED_BYTES:
            position += _FIXED_BYTES[wire]
        else:
            raise ValueError("unknown wire type")
        if position > end:
            raise ValueError("truncated")
        yield tag >> 3, begin, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at `position`, and the position after it. Raises IndexError if the varint
    is truncated, and ValueError if it has more than ten bytes."""
    result = data[position]
    position += 1
    if result < 0x80:
        return result, position
    result &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
    raise ValueError("varint too long")
