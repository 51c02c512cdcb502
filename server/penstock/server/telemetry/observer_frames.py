"""The frames between a front and the observer process.

Owns which kinds there are and how each is written and read, with the link's primitives. Records
pass as the bytes that their codec made. Does not know sockets.
"""

import enum
import math
import struct
from dataclasses import dataclass
from typing import TypeAlias

from penstock.server.link.look_frames import (
    Order,
    OrderAnswer,
    read_order,
    read_order_answer,
    write_order,
    write_order_answer,
)
from penstock.server.link.wire import LinkError, Reader, Writer
from penstock.server.telemetry.beat import Beat, OutcomeCount
from penstock.server.telemetry.front_view import FrontView

_BEAT = struct.Struct("<IIQBBQQQQQQQQQ")
_VIEW = struct.Struct("<IqdQQQQQ")


class ObserverFrameKind(enum.IntEnum):
    """The byte in the header that says how to read the body."""

    HELLO = 1
    RECORDS = 2
    BEAT = 3
    LIVE_QUERY = 4
    LIVE_ANSWER = 5
    ORDER = 6
    ORDER_ANSWER = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a front says first. `front_id` is of this one life of it."""

    front_id: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Requests that have ended, oldest first: what `record_codec` made of each."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveQuery:
    """Which requests live? `ticket` (32 bits) comes back in the answer."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAnswer:
    """Requests of a front that have not been released; all of them with the `is_last` answer."""

    ticket: int
    views: tuple[FrontView, ...]
    is_last: bool = True


ObserverFrame: TypeAlias = Hello | Records | Beat | LiveQuery | LiveAnswer | Order | OrderAnswer


def encode(frame: ObserverFrame) -> bytes:
    """One frame, header included. Raises LinkError when it is too large."""
    out = Writer()
    return out.frame(_write(out, frame))


def decode(kind: int, body: bytes) -> ObserverFrame:
    """The frame of a body from `FrameBuffer.feed`. Raises LinkError when it is malformed."""
    data = Reader(body)
    try:
        frame = _read(ObserverFrameKind(kind), data)
    except ValueError as error:
        raise LinkError(f"a malformed frame of kind {kind}: {error}") from error
    data.end()
    return frame


def _write(out: Writer, frame: ObserverFrame) -> ObserverFrameKind:
    match frame:
        case Records(payloads=payloads):
            out.u32(len(payloads))
            for payload in payloads:
                out.blob(payload)
            return ObserverFrameKind.RECORDS
        case Beat():
            _write_beat(out, frame)
            return ObserverFrameKind.BEAT
        case Hello():
            out.u32(frame.front_id)
            out.u32(frame.pid)
            return ObserverFrameKind.HELLO
        case LiveQuery(ticket=ticket):
            out.u32(ticket)
            return ObserverFrameKind.LIVE_QUERY
        case LiveAnswer():
            out.u32(frame.ticket)
            out.u8(frame.is_last)
            out.u32(len(frame.views))
            for view in frame.views:
                _write_view(out, view)
            return ObserverFrameKind.LIVE_ANSWER
        case Order():
            write_order(out, frame)
            return ObserverFrameKind.ORDER
        case OrderAnswer():
            write_order_answer(out, frame)
            return ObserverFrameKind.ORDER_ANSWER


def _read(kind: ObserverFrameKind, data: Reader) -> ObserverFrame:
    match kind:
        case ObserverFrameKind.RECORDS:
            return Records(payloads=tuple(data.blob() for _ in range(data.u32())))
        case ObserverFrameKind.BEAT:
            return _read_beat(data)
        case ObserverFrameKind.HELLO:
            return Hello(front_id=data.u32(), pid=data.u32())
        case ObserverFrameKind.LIVE_QUERY:
            return LiveQuery(ticket=data.u32())
        case ObserverFrameKind.LIVE_ANSWER:
            return LiveAnswer(
                ticket=data.u32(),
                is_last=data.u8() != 0,
                views=tuple(_read_view(data) for _ in range(data.u32())),
            )
        case ObserverFrameKind.ORDER:
            return read_order(data)
        case ObserverFrameKind.ORDER_ANSWER:
            return read_order_answer(data)


def _write_beat(out: Writer, beat: Beat) -> None:
    out.packed(
        _BEAT,
        beat.front_id,
        beat.pid,
        beat.epoch,
        beat.is_draining,
        beat.is_engine_up,
        beat.num_streams,
        beat.num_live,
        beat.num_backlog_tokens,
        beat.num_submitted,
        beat.num_cut_readers,
        beat.num_late_events,
        beat.num_unknown_fields,
        beat.num_internal_errors,
        beat.num_records,
    )
    out.u32(len(beat.dropped_records))
    for reason, num in beat.dropped_records.items():
        out.text(reason)
        out.u64(num)
    out.u32(len(beat.outcomes))
    for outcome in beat.outcomes:
        out.text(outcome.method)
        out.u32(outcome.code)
        out.text(outcome.reason)
        out.text(outcome.finish_reason)
        out.u64(outcome.num)
    out.u32(len(beat.loop_lag_s))
    for lag_s in beat.loop_lag_s:
        out.f64(lag_s)
    out.f64(math.nan if beat.queue_estimate_s is None else beat.queue_estimate_s)
    out.f64(beat.queue_estimate_at_s)


def _read_beat(data: Reader) -> Beat:
    numbers = tuple(map(int, data.packed(_BEAT)))
    front_id, pid, epoch, is_draining, is_engine_up, num_streams, num_live = numbers[:7]
    num_backlog, num_submitted, num_cut, num_late, num_unknown, num_internal, num_records = numbers[
        7:
    ]
    return Beat(
        front_id=front_id,
        pid=pid,
        epoch=epoch,
        is_draining=bool(is_draining),
        is_engine_up=bool(is_engine_up),
        num_streams=num_streams,
        num_live=num_live,
        num_backlog_tokens=num_backlog,
        num_submitted=num_submitted,
        num_cut_readers=num_cut,
        num_late_events=num_late,
        num_unknown_fields=num_unknown,
        num_internal_errors=num_internal,
        num_records=num_records,
        dropped_records={data.text(): data.u64() for _ in range(data.u32())},
        outcomes=tuple(_read_outcome(data) for _ in range(data.u32())),
        loop_lag_s=tuple(data.f64() for _ in range(data.u32())),
        queue_estimate_s=None if math.isnan(estimate_s := data.f64()) else estimate_s,
        queue_estimate_at_s=data.f64(),
    )


def _read_outcome(data: Reader) -> OutcomeCount:
    return OutcomeCount(
        method=data.text(),
        code=data.u32(),
        reason=data.text(),
        finish_reason=data.text(),
        num=data.u64(),
    )


def _write_view(out: Writer, view: FrontView) -> None:
    out.packed(
        _VIEW,
        view.front_id,
        view.priority,
        view.arrival_s,
        view.num_prompt_tokens,
        view.num_cached_tokens,
        view.num_output_tokens,
        view.num_preemptions,
        view.num_backlog_tokens,
    )
    for text in (view.request_id, view.tenant, view.trace_id, view.phase):
        out.text(text)
    out.u32(len(view.keys))
    for key in view.keys:
        out.i64(key)
    out.u32(len(view.history))
    for phase, since_s in view.history:
        out.text(phase)
        out.f64(since_s)


def _read_view(data: Reader) -> FrontView:
    numbers = data.packed(_VIEW)
    front_id, priority = map(int, numbers[:2])
    num_prompt, num_cached, num_output, num_preemptions, num_backlog = map(int, numbers[3:])
    return FrontView(
        front_id=front_id,
        priority=priority,
        arrival_s=numbers[2],
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_output_tokens=num_output,
        num_preemptions=num_preemptions,
        num_backlog_tokens=num_backlog,
        request_id=data.text(),
        tenant=data.text(),
        trace_id=data.text(),
        phase=data.text(),
        keys=tuple(data.i64() for _ in range(data.u32())),
        history=tuple((data.text(), data.f64()) for _ in range(data.u32())),
    )
