"""Frames between fronts and observer: what is written is read, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.link.look_frames import Order, OrderAnswer, OrderVerb
from penstock.server.link.wire import FrameBuffer, LinkError
from penstock.server.telemetry.beat import Beat, OutcomeCount
from penstock.server.telemetry.front_view import FrontView
from penstock.server.telemetry.observer_frames import (
    Hello,
    LiveAnswer,
    LiveQuery,
    ObserverFrame,
    Records,
    decode,
    encode,
)

COUNTS = st.integers(0, 2**63)
U32 = st.integers(0, 2**32 - 1)
TEXTS = st.text(max_size=20)
SECONDS = st.floats(allow_nan=False)
OUTCOMES = st.builds(
    OutcomeCount, method=TEXTS, code=U32, reason=TEXTS, finish_reason=TEXTS, num=COUNTS
)
BEATS = st.builds(
    Beat,
    front_id=U32,
    pid=U32,
    **{
        field.name: COUNTS
        for field in dataclasses.fields(Beat)
        if field.name.startswith("num_") or field.name == "epoch"
    },
    dropped_records=st.dictionaries(TEXTS, COUNTS, max_size=3),
    outcomes=st.lists(OUTCOMES, max_size=3).map(tuple),
    loop_lag_s=st.lists(SECONDS, max_size=12).map(tuple),
    queue_estimate_s=st.none() | SECONDS,
    queue_estimate_at_s=SECONDS,
)
VIEWS = st.builds(
    FrontView,
    front_id=U32,
    priority=st.integers(-(2**63), 2**63 - 1),
    arrival_s=SECONDS,
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    history=st.lists(st.tuples(TEXTS, SECONDS), max_size=3).map(tuple),
    request_id=TEXTS,
    tenant=TEXTS,
    trace_id=TEXTS,
    phase=TEXTS,
    **{
        field.name: COUNTS
        for field in dataclasses.fields(FrontView)
        if field.name.startswith("num_")
    },
)
FRAMES = st.one_of(
    BEATS,
    st.builds(Hello, front_id=U32, pid=U32),
    st.builds(Records, payloads=st.lists(st.binary(max_size=30), max_size=4).map(tuple)),
    st.builds(LiveQuery, ticket=U32),
    st.builds(
        LiveAnswer, ticket=U32, views=st.lists(VIEWS, max_size=3).map(tuple), is_last=st.booleans()
    ),
    st.builds(Order, ticket=U32, verb=st.sampled_from(OrderVerb), argument=TEXTS),
    st.builds(OrderAnswer, ticket=U32, problem=TEXTS, payload=st.binary(max_size=40)),
)


@given(FRAMES)
def test_every_frame_is_read_as_it_was_written(frame: ObserverFrame) -> None:
    ((kind, body),) = FrameBuffer().feed(encode(frame))
    assert decode(kind, body) == frame


@given(FRAMES, st.data())
def test_a_frame_that_is_cut_or_too_long_is_refused(
    frame: ObserverFrame, data: st.DataObject
) -> None:
    ((kind, body),) = FrameBuffer().feed(encode(frame))
    end = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(LinkError):
        decode(kind, body[:end])
    with pytest.raises(LinkError):
        decode(kind, body + b"\0")


@pytest.mark.parametrize(("kind", "body"), [(0, b""), (99, b""), (6, b"\0\0\0\0\x07\0\0\0\0")])
def test_what_is_no_frame_is_refused(kind: int, body: bytes) -> None:
    with pytest.raises(LinkError):
        decode(kind, body)
