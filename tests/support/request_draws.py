"""A Hypothesis strategy for requests with any fields set to any values that their types allow."""

import math

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from penstock.v1.generation_service_pb2 import GenerateRequest

_SCALARS: dict[int, st.SearchStrategy[object]] = {
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32)
    | st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 20),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


def scalar(field: FieldDescriptor) -> st.SearchStrategy[object]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=5)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=70)
    return _SCALARS[field.cpp_type]


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    message = GenerateRequest()
    fill(draw, message, GenerateRequest.DESCRIPTOR, draw(st.sampled_from([1, 2, 8, 16])))
    return message


def fill(draw: st.DrawFn, message: Message, descriptor: Descriptor, one_in: int) -> None:
    for field in descriptor.fields:
        if draw(st.integers(1, one_in)) != one_in:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            # The content of a Struct is not a field of the contract.
            continue
        if field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type is not None:
                    fill(draw, getattr(message, field.name).add(), field.message_type, 1)
                else:
                    getattr(message, field.name).append(draw(scalar(field)))
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            fill(draw, child, field.message_type, one_in)
        else:
            setattr(message, field.name, draw(scalar(field)))
