"""Ended requests are counted, with or without a listener."""

from __future__ import annotations

import pytest

from penstock.server.observe.frames import OutcomeCount
from penstock.server.observe.request_record import (
    NO_ROOM,
    UNREADABLE,
    RequestRecorder,
    decode_record,
)
from support.request_records import refused_record, request_record

METHOD = "penstock.v1.GenerationService/Generate"


def test_every_record_is_counted_and_offered_once() -> None:
    offered: list[bytes] = []

    def take(data: bytes) -> bool:
        offered.append(data)
        return len(offered) != 2

    recorder = RequestRecorder(take)
    for sequence in range(3):
        recorder.note(request_record(sequence))
    recorder.note(refused_record(8, "QUEUE_FULL", sequence=3))
    assert [decode_record(data).sequence for data in offered] == [0, 1, 2, 3]
    assert recorder.num_records == 4
    assert recorder.dropped_records == {NO_ROOM: 1}
    assert recorder.outcomes() == (
        OutcomeCount(method=METHOD, code=0, reason="", finish_reason="STOP", num=3),
        OutcomeCount(method=METHOD, code=8, reason="QUEUE_FULL", finish_reason="", num=1),
    )


def test_nobody_listens_and_all_are_counted() -> None:
    recorder = RequestRecorder()
    recorder.note(request_record(0))
    assert (recorder.num_records, recorder.dropped_records) == (1, {})


def test_a_number_is_given_once() -> None:
    recorder = RequestRecorder()
    recorder.note(request_record(0))
    with pytest.raises(ValueError, match="sequence must be 1, not 0"):
        recorder.note(request_record(0))


def test_a_record_that_cannot_be_made_counts_and_is_missed() -> None:
    offered: list[bytes] = []

    def take(data: bytes) -> bool:
        offered.append(data)
        return True

    recorder = RequestRecorder(take)
    recorder.note_unreadable(METHOD, 13, "INTERNAL")
    recorder.note(request_record(1))
    assert recorder.dropped_records == {UNREADABLE: 1}
    assert [decode_record(data).sequence for data in offered] == [1], "the gap shows"
    assert sum(outcome.num for outcome in recorder.outcomes()) == 2
