"""Records go over the wire whole or not at all."""

from __future__ import annotations

import dataclasses
import marshal
import math
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.events import Stay
from penstock.server.telemetry.record_codec import RECORD_VERSION, decode_record, encode_record
from penstock.server.telemetry.request_record import RequestRecord, Segment, SegmentKind
from support.records import RECORDS, plain_record


@given(RECORDS)
def test_what_is_read_is_what_was_written(record: RequestRecord) -> None:
    assert decode_record(encode_record(record)) == record


def test_unknown_times_stay_unknown() -> None:
    record = dataclasses.replace(plain_record(), ttft_s=math.nan)
    assert math.isnan(decode_record(encode_record(record)).ttft_s)


def test_numbers_of_the_engine_may_be_numpys() -> None:
    stay: Any = Stay(num_steps=np.int64(7))  # type: ignore[arg-type]  # as it may come
    segment = Segment(SegmentKind.DECODE, 1.0, 2.0, stay=stay)
    record = dataclasses.replace(plain_record(), segments=(segment,))
    (read,) = decode_record(encode_record(record)).segments
    assert read.stay == Stay(num_steps=7)
    assert read.stay is not None
    assert type(read.stay.num_steps) is int


@given(RECORDS, st.data())
def test_damage_is_noticed(record: RequestRecord, data: st.DataObject) -> None:
    whole = encode_record(record)
    position = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="record"):
        decode_record(bytes(damaged))
    with pytest.raises(ValueError, match="record"):
        decode_record(whole[:position])


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        decode_record(data)


def framed(values: object, extra: bytes = b"") -> bytes:
    body = marshal.dumps(values, 4) + extra  # type: ignore[arg-type]  # whatever comes
    return bytes((RECORD_VERSION,)) + zlib.crc32(body).to_bytes(4, "little") + body


def values_of(record: RequestRecord) -> list[Any]:
    return list(marshal.loads(encode_record(record)[5:]))


def edited(position: int, value: object) -> bytes:
    values = values_of(plain_record())
    values[position] = value
    return framed(tuple(values))


@pytest.mark.parametrize(
    "data",
    [
        framed(7),
        framed(()),
        framed(tuple(values_of(plain_record())), extra=b"N"),
        framed(values_of(plain_record())),
        edited(0, "0"),
        edited(2, b"r"),
        edited(7, (b"", b"", b"", 1, "")),
        edited(10, True),
        edited(12, (7,)),
        edited(14, ((9, 1.0, 2.0, None, None, 0, 0),)),
        edited(14, ((0, 1, 2.0, None, None, 0, 0),)),
        edited(14, ((0, 1.0, 2.0, (1.0,), None, 0, 0),)),
        edited(26, ("prompt", ("output", 7))),
    ],
)
def test_a_record_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_record(data)
