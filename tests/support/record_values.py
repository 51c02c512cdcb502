"""Records as the values that a front writes them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, cast

from penstock.server.front.segments import Mark, segments_of
from penstock.server.telemetry.record_codec import (
    RecordValues,
    SegmentValues,
    decode_record,
    encode_record,
)
from penstock.server.telemetry.request_record import RequestRecord, Segment
from support.records import plain_record


def values_of(record: RequestRecord) -> RecordValues:
    values: list[Any] = [getattr(record, name) for name in RequestRecord.__slots__]
    values[7] = astuple(record.trace)
    values[13] = astuple(record.options)
    values[14] = tuple(map(segment_values, record.segments))
    values[26] = None if record.content is None else astuple(record.content)
    return cast(RecordValues, tuple(values))


def segment_values(segment: Segment) -> SegmentValues:
    accounts = (None if told is None else tuple(told) for told in (segment.wait, segment.stay))
    kind, start_s, end_s, _, _, *rest = astuple(segment)
    return cast(SegmentValues, (kind.value, start_s, end_s, *accounts, *rest))


def encoded(record: RequestRecord) -> bytes:
    return encode_record(values_of(record))


def read_segments(marks: Sequence[Mark], *, end_s: float, num_tokens: int) -> tuple[Segment, ...]:
    """The segments of marks as who reads the record sees them."""
    values: list[Any] = list(values_of(plain_record()))
    values[14] = segments_of(marks, end_s=end_s, num_tokens=num_tokens)
    return decode_record(encode_record(cast(RecordValues, tuple(values)))).segments
