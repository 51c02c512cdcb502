"""Records are sent between processes whole or not at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.request_record import RequestRecord, decode_record, encode_record
from support.frame_draws import drawn
from support.request_records import request_record

RECORDS: st.SearchStrategy[RequestRecord] = drawn(RequestRecord)


@given(RECORDS)
def test_what_is_read_is_what_was_written(record: RequestRecord) -> None:
    assert decode_record(encode_record(record)) == record


def test_unknown_times_stay_unknown() -> None:
    assert math.isnan(decode_record(encode_record(request_record(ttft_s=math.nan))).ttft_s)


@given(RECORDS, st.data())
def test_a_part_of_a_record_is_none(record: RequestRecord, data: st.DataObject) -> None:
    whole = encode_record(record)
    for broken in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + whole[:1]):
        with pytest.raises(ValueError, match="no record"):
            decode_record(broken)


@given(RECORDS, st.data())
def test_a_record_that_is_damaged_is_a_record_or_refused(
    record: RequestRecord, data: st.DataObject
) -> None:
    damaged = bytearray(encode_record(record))
    at = data.draw(st.integers(0, len(damaged)))
    damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        decode_record(bytes(damaged))
    except ValueError:
        return
