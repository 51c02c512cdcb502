"""Records as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.scheduler.events import Stay, Wait
from penstock.server.telemetry.request_record import (
    Content,
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
    TraceParent,
)

COUNTS = st.integers(0, 2**63)
TIMES = st.floats(allow_nan=False, allow_infinity=False)
# As many digits as are told of a number that came in single precision.
OPTIONS = st.none() | TIMES.map(lambda value: round(value, 6))
TEXTS = st.text(max_size=20)
WAITS = st.builds(
    Wait,
    blocks_s=TIMES,
    slots_s=TIMES,
    token_budget_s=TIMES,
    fairness_s=TIMES,
    other_s=TIMES,
    num_passed_by=COUNTS,
)
STAYS = st.builds(
    Stay, num_chunks=COUNTS, num_steps=COUNTS, min_batch_size=COUNTS, max_batch_size=COUNTS
)
SEGMENTS = st.builds(
    Segment,
    st.sampled_from(SegmentKind),
    TIMES,
    TIMES,
    st.none() | WAITS,
    st.none() | STAYS,
    COUNTS,
    COUNTS,
)
RECORDS = st.builds(
    RequestRecord,
    sequence=COUNTS,
    front_id=COUNTS,
    request_id=TEXTS,
    method=TEXTS,
    model=TEXTS,
    tenant=TEXTS,
    peer=TEXTS,
    trace=st.builds(
        TraceParent,
        st.binary(max_size=16),
        st.binary(max_size=8),
        st.binary(max_size=8),
        st.none() | st.booleans(),
        TEXTS,
    ),
    arrival_s=TIMES,
    end_s=TIMES,
    code=st.integers(0, 16),
    reason=TEXTS,
    finish_reasons=st.lists(TEXTS, max_size=3).map(tuple),
    options=st.builds(
        RequestOptions,
        is_chat=st.booleans(),
        is_stream=st.booleans(),
        num_outputs=COUNTS,
        max_tokens=st.none() | COUNTS,
        temperature=OPTIONS,
        top_p=OPTIONS,
        top_k=st.none() | COUNTS,
        frequency_penalty=OPTIONS,
        presence_penalty=OPTIONS,
        seed=st.none() | COUNTS,
        priority=st.integers(-100, 100),
    ),
    segments=st.lists(SEGMENTS, max_size=4).map(tuple),
    num_prompt_tokens=COUNTS,
    num_cached_tokens=COUNTS,
    num_completion_tokens=COUNTS,
    ttft_s=TIMES,
    num_ahead=st.integers(-1, 100),
    estimated_queue_s=TIMES,
    num_preemptions=COUNTS,
    num_messages=COUNTS,
    stalled_s=TIMES,
    num_stalls=COUNTS,
    num_replays=COUNTS,
    content=st.none() | st.builds(Content, TEXTS, st.lists(TEXTS, max_size=2).map(tuple)),
)


def plain_record(sequence: int = 0, *, code: int = 0, reason: str = "") -> RequestRecord:
    """A request that was refused as soon as it came."""
    return RequestRecord(
        sequence=sequence,
        front_id=1,
        request_id="r",
        method="penstock.v1.GenerationService/Generate",
        model="tiny",
        tenant="",
        peer="",
        trace=TraceParent(b"t" * 16, b"s" * 8),
        arrival_s=1.0,
        end_s=2.0,
        code=code,
        reason=reason,
        finish_reasons=("STOP",) if code == 0 else (),
        options=RequestOptions(),
        segments=(Segment(SegmentKind.PREPARE, 1.0, 2.0),),
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_completion_tokens=0,
        ttft_s=0.5,
        num_ahead=-1,
        estimated_queue_s=0.0,
        num_preemptions=0,
        num_messages=0,
        stalled_s=0.0,
        num_stalls=0,
    )
