"""Records of requests, for tests of code that reads them."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from penstock.scheduler.events import Stay, Wait
from penstock.server.observe.request_record import (
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
    TraceParent,
)

GENERATE = "penstock.v1.GenerationService/Generate"
WAIT = Wait(blocks_s=0.3, slots_s=0.05, token_budget_s=0.1, other_s=0.05, num_passed_by=2)
STAY = Stay(num_chunks=3, num_steps=20, min_batch_size=4, max_batch_size=9)


def trace_parent(number: int = 1, **changes: Any) -> TraceParent:
    """Return the context of a new trace."""
    parent = TraceParent(
        trace_id=(0xA11CE << 64 | number).to_bytes(16, "big"),
        span_id=(0xB0B << 32 | number).to_bytes(8, "big"),
    )
    return msgspec.structs.replace(parent, **changes)


def segments_of(arrival_s: float = 100.0) -> tuple[Segment, ...]:
    """Return the segments of an undisturbed request: half a second queued, two in total."""
    return (
        Segment(SegmentKind.PREPARE, arrival_s, arrival_s + 0.01),
        Segment(SegmentKind.QUEUE, arrival_s + 0.01, arrival_s + 0.51, wait=WAIT),
        Segment(SegmentKind.PREFILL, arrival_s + 0.51, arrival_s + 0.7, num_cached_tokens=32),
        Segment(SegmentKind.DECODE, arrival_s + 0.7, arrival_s + 1.95, stay=STAY, num_tokens=17),
        Segment(SegmentKind.DELIVER, arrival_s + 1.95, arrival_s + 2.0),
    )


def request_record(number: int = 1, **changes: Any) -> RequestRecord:
    """Return the record of a successful request, with `changes`."""
    arrival_s: float = changes.get("arrival_s", 100.0)
    record = RequestRecord(
        sequence=number,
        front_id=3,
        request_id=f"request-{number}",
        method=GENERATE,
        model="tiny",
        tenant="acme",
        peer="ipv4:127.0.0.1:50123",
        trace=trace_parent(number),
        arrival_s=arrival_s,
        end_s=arrival_s + 2.0,
        code=0,
        reason="",
        finish_reasons=("STOP",),
        options=RequestOptions(max_tokens=64, temperature=0.7, top_p=0.9, top_k=40, seed=7),
        segments=segments_of(arrival_s),
        num_prompt_tokens=96,
        num_cached_tokens=32,
        num_completion_tokens=17,
        ttft_s=0.7,
        num_ahead=5,
        estimated_queue_s=0.4,
        num_preemptions=0,
        num_messages=18,
        stalled_s=0.0,
        num_stalls=0,
    )
    return msgspec.structs.replace(record, **changes)


def refused_record(code: int, reason: str, **changes: Any) -> RequestRecord:
    """Return the record of a request that ended in preparation."""
    told: dict[str, Any] = {
        "code": code,
        "reason": reason,
        "finish_reasons": (),
        "end_s": 100.002,
        "segments": (Segment(SegmentKind.PREPARE, 100.0, 100.002),),
        "num_cached_tokens": 0,
        "num_completion_tokens": 0,
        "ttft_s": math.nan,
        "num_ahead": -1,
        "estimated_queue_s": math.nan,
        "num_messages": 0,
    }
    return request_record(**(told | changes))


def preempted_record(**changes: Any) -> RequestRecord:
    """Return the record of a request that was preempted once, while it decoded."""
    kinds = SegmentKind
    segments = (
        Segment(kinds.PREPARE, 100.0, 100.1),
        Segment(kinds.QUEUE, 100.1, 100.2, wait=Wait(slots_s=0.1)),
        Segment(kinds.PREFILL, 100.2, 100.3),
        Segment(kinds.DECODE, 100.3, 100.8, stay=STAY, num_tokens=9),
        Segment(kinds.QUEUE, 100.8, 101.2, wait=Wait(blocks_s=0.4)),
        Segment(kinds.PREFILL, 101.2, 101.3, num_cached_tokens=64),
        Segment(kinds.DECODE, 101.3, 101.9, stay=Stay(num_chunks=1, num_steps=9), num_tokens=8),
        Segment(kinds.DELIVER, 101.9, 102.0),
    )
    told: dict[str, Any] = {"segments": segments, "num_preemptions": 1}
    return request_record(**(told | changes))
