"""Records go over the wire whole or not at all."""

from __future__ import annotations

import dataclasses
import marshal
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.telemetry.record_codec import RECORD_VERSION, decode_record, ending_of
from penstock.server.telemetry.request_record import RequestOptions, RequestRecord
from support.record_values import encoded, values_of
from support.records import RECORDS, plain_record


@given(RECORDS)
def test_what_is_read_is_what_was_written(record: RequestRecord) -> None:
    assert decode_record(encoded(record)) == record


def test_unknown_times_stay_unknown() -> None:
    record = dataclasses.replace(plain_record(), ttft_s=math.nan)
    assert math.isnan(decode_record(encoded(record)).ttft_s)


def test_options_are_told_as_they_were_written() -> None:
    options = RequestOptions(temperature=float(np.float32(0.7)), top_p=float(np.float32(0.95)))
    record = dataclasses.replace(plain_record(), options=options)
    read = decode_record(encoded(record)).options
    assert (read.temperature, read.top_p) == (0.7, 0.95)


def test_a_record_counts_by_its_first_output() -> None:
    record = dataclasses.replace(plain_record(), finish_reasons=("LENGTH", "STOP"))
    assert ending_of(values_of(record)) == (record.method, 0, "", "LENGTH")
    refused = plain_record(code=8, reason="QUEUE_FULL")
    assert ending_of(values_of(refused)) == (record.method, 8, "QUEUE_FULL", "")


@given(RECORDS, st.data())
def test_a_part_of_a_record_is_none(record: RequestRecord, data: st.DataObject) -> None:
    whole = encoded(record)
    position = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="record"):
        decode_record(whole[:position])
    with pytest.raises(ValueError, match="record"):
        decode_record(whole + whole[:1])


@given(st.binary(max_size=200).filter(lambda data: data[:1] != bytes((RECORD_VERSION,))))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        decode_record(data)


def framed(values: object, extra: bytes = b"") -> bytes:
    body = marshal.dumps(values, 2) + extra  # type: ignore[arg-type]  # whatever comes
    return bytes((RECORD_VERSION,)) + body


def edited(position: int, value: object) -> bytes:
    values: list[Any] = list(values_of(plain_record()))
    values[position] = value
    return framed(tuple(values))


@pytest.mark.parametrize(
    "data",
    [
        framed(7),
        framed(()),
        framed(values_of(plain_record()), extra=b"N"),
        framed(list(values_of(plain_record()))),
        edited(0, "0"),
        edited(2, b"r"),
        edited(7, (b"", b"", b"", 1, "")),
        edited(10, True),
        edited(12, (7,)),
        edited(14, (("nap", 1.0, 2.0, None, None, 0, 0),)),
        edited(14, (("queue", 1, 2.0, None, None, 0, 0),)),
        edited(14, (("queue", 1.0, 2.0, (1.0,), None, 0, 0),)),
        # `marshal` takes numpy's numbers for mere bytes.
        edited(15, np.int64(7)),
        edited(18, np.float64(7.0)),
        edited(26, ("prompt", ("output", 7))),
    ],
)
def test_a_record_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_record(data)
