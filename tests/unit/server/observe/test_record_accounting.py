"""Each record of an ended request is counted, and is sent to another process completely or not at
all.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.frames import OutcomeCount
from penstock.server.observe.request_record import (
    RequestRecord,
    RequestRecorder,
    decode_record,
    encode_record,
)
from support.frame_draws import drawn
from support.reports import rejected_record, request_record

RECORDS: st.SearchStrategy[RequestRecord] = drawn(RequestRecord)


@given(RECORDS)
def test_a_record_is_decoded_as_it_was_encoded(record: RequestRecord) -> None:
    assert decode_record(encode_record(record)) == record


def test_unknown_times_stay_unknown() -> None:
    assert math.isnan(decode_record(encode_record(request_record(ttft_s=math.nan))).ttft_s)


@given(RECORDS, st.data())
def test_a_truncated_or_extended_record_is_rejected(
    record: RequestRecord, data: st.DataObject
) -> None:
    whole = encode_record(record)
    for broken in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + whole[:1]):
        with pytest.raises(ValueError, match="no record"):
            decode_record(broken)


@given(RECORDS, st.data())
def test_a_record_that_is_damaged_is_a_record_or_rejected(
    record: RequestRecord, data: st.DataObject
) -> None:
    damaged = bytearray(encode_record(record))
    at = data.draw(st.integers(0, len(damaged)))
    damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        decode_record(bytes(damaged))
    except ValueError:
        return


METHOD = "penstock.v1.GenerationService/Generate"


def test_every_record_is_counted_and_offered_once() -> None:
    offered: list[bytes] = []
    recorder = RequestRecorder(offered.append)
    for sequence in range(3):
        recorder.note(request_record(sequence))
    recorder.note(rejected_record(8, "QUEUE_FULL", sequence=3))
    assert [decode_record(data).sequence for data in offered] == [0, 1, 2, 3]
    assert recorder.num_records == 4
    assert recorder.num_unreadable == 0
    assert recorder.outcomes() == (
        OutcomeCount(method=METHOD, code=0, reason="", finish_reason="STOP", num=3),
        OutcomeCount(method=METHOD, code=8, reason="QUEUE_FULL", finish_reason="", num=1),
    )


def test_without_a_receiver_all_are_counted() -> None:
    recorder = RequestRecorder()
    recorder.note(request_record(0))
    assert (recorder.num_records, recorder.num_unreadable) == (1, 0)


def test_a_number_is_given_once() -> None:
    recorder = RequestRecorder()
    recorder.note(request_record(0))
    with pytest.raises(ValueError, match="sequence must be 1, not 0"):
        recorder.note(request_record(0))


def test_a_record_that_cannot_be_created_is_counted_as_missing() -> None:
    offered: list[bytes] = []
    recorder = RequestRecorder(offered.append)
    recorder.note_unreadable(METHOD, 13, "INTERNAL")
    recorder.note(request_record(1))
    assert recorder.num_unreadable == 1
    assert [decode_record(data).sequence for data in offered] == [1], "the gap shows"
    assert sum(outcome.num for outcome in recorder.outcomes()) == 2
