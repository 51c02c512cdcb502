"""The frames of the link: which kinds there are and how each is written and read.

Owns cancellation and dispatch by kind; the others have modules of their own. Does not know sockets.
"""

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.link.cache_frames import (
    CacheFrame,
    CacheNews,
    Follow,
    Unfollow,
    read_cache_news,
    read_follow,
    write_cache_news,
    write_follow,
)
from penstock.server.link.hello_frames import read_engine_hello, write_engine_hello
from penstock.server.link.look_frames import (
    Look,
    LookAnswer,
    Order,
    OrderAnswer,
    read_look_answer,
    read_order,
    read_order_answer,
    write_look_answer,
    write_order,
    write_order_answer,
)
from penstock.server.link.ports import EngineHello
from penstock.server.link.resume_frames import (
    Ask,
    Claim,
    ClaimAnswer,
    Give,
    Gone,
    Keep,
    ResumeFrame,
    Settle,
    read_ask,
    read_claim,
    read_claim_answer,
    read_give,
    read_gone,
    read_keep,
    read_settle,
    write_answer,
    write_keep,
    write_question,
    write_word,
)
from penstock.server.link.spec_frames import Submit, read_submit, write_submit
from penstock.server.link.step_frames import read_step, write_step
from penstock.server.link.wire import LinkError, Reader, Writer

MAX_FRONT_ID = 2**31 - 1


class FrameKind(enum.IntEnum):
    """The byte in the header that says how to read the body."""

    FRONT_HELLO = 1
    ENGINE_HELLO = 2
    SUBMIT = 3
    CANCEL = 4
    CANCEL_BY_ID = 5
    CANCEL_ANSWER = 6
    STEP = 7
    OBSERVER_HELLO = 8
    LOOK = 9
    LOOK_ANSWER = 10
    ORDER = 11
    ORDER_ANSWER = 12
    KEEP = 20
    CLAIM = 21
    ASK = 22
    GIVE = 23
    CLAIM_ANSWER = 24
    SETTLE = 25
    GONE = 26
    FOLLOW = 30
    UNFOLLOW = 31
    CACHE_NEWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontHello:
    """What a front says first: the upper half of every key it will use, 1 .. 2**31 - 1."""

    front_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverHello:
    """What one says first that only looks: it has no requests, and hears of no steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cancel:
    """End these requests with `reason`. `keys` int64 [n]."""

    keys: NDArray[np.int64]
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelById:
    """End a request of any front; `ticket` (32 bits) comes back in the answer."""

    ticket: int
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAnswer:
    """Where the request of a `CancelById` stood, None when it is not live."""

    ticket: int
    state: RequestState | None


Frame: TypeAlias = (
    FrontHello
    | EngineHello
    | Submit
    | Cancel
    | CancelById
    | CancelAnswer
    | StepEvents
    | ObserverHello
    | Look
    | LookAnswer
    | Order
    | OrderAnswer
    | ResumeFrame
    | CacheFrame
)


def encode(frame: Frame) -> bytes:
    """One frame, header included. Raises LinkError when it is too large."""
    out = Writer()
    return out.frame(_write(out, frame))


def decode(kind: int, body: bytes) -> Frame:
    """The frame of a body from `FrameBuffer.feed`. Raises LinkError when it is malformed."""
    data = Reader(body)
    try:
        frame = _read(FrameKind(kind), data)
    except ValueError as error:
        raise LinkError(f"a malformed frame of kind {kind}: {error}") from error
    data.end()
    return frame


def _write(out: Writer, frame: Frame) -> FrameKind:
    match frame:
        case StepEvents():
            write_step(out, frame)
            return FrameKind.STEP
        case Submit():
            write_submit(out, frame)
            return FrameKind.SUBMIT
        case Look() | LookAnswer() | Order() | OrderAnswer() | ObserverHello():
            return _write_look(out, frame)
        case Keep() | Claim() | Ask() | Give() | ClaimAnswer() | Settle() | Gone():
            return _write_resume(out, frame)
        case Cancel() | CancelById() | CancelAnswer():
            return _write_cancel(out, frame)
        case Follow() | Unfollow() | CacheNews():
            return _write_cache(out, frame)
        case FrontHello():
            out.u32(frame.front_id)
            return FrameKind.FRONT_HELLO
        case EngineHello():
            write_engine_hello(out, frame)
            return FrameKind.ENGINE_HELLO


def _write_look(
    out: Writer, frame: Look | LookAnswer | Order | OrderAnswer | ObserverHello
) -> FrameKind:
    match frame:
        case Look():
            out.u32(frame.ticket)
            return FrameKind.LOOK
        case LookAnswer():
            write_look_answer(out, frame)
            return FrameKind.LOOK_ANSWER
        case Order():
            write_order(out, frame)
            return FrameKind.ORDER
        case OrderAnswer():
            write_order_answer(out, frame)
            return FrameKind.ORDER_ANSWER
        case ObserverHello():
            return FrameKind.OBSERVER_HELLO


def _write_cancel(out: Writer, frame: Cancel | CancelById | CancelAnswer) -> FrameKind:
    match frame:
        case Cancel():
            out.u8(frame.reason)
            out.u32(len(frame.keys))
            out.array(frame.keys, np.int64)
            return FrameKind.CANCEL
        case CancelById():
            out.u32(frame.ticket)
            out.text(frame.request_id)
            return FrameKind.CANCEL_BY_ID
        case CancelAnswer():
            out.u32(frame.ticket)
            out.u8(frame.state or 0)
            return FrameKind.CANCEL_ANSWER


def _write_resume(out: Writer, frame: ResumeFrame) -> FrameKind:
    match frame:
        case Keep():
            write_keep(out, frame)
            return FrameKind.KEEP
        case Claim():
            write_question(out, frame)
            return FrameKind.CLAIM
        case Ask():
            write_question(out, frame)
            return FrameKind.ASK
        case Give():
            write_answer(out, frame)
            return FrameKind.GIVE
        case ClaimAnswer():
            write_answer(out, frame)
            return FrameKind.CLAIM_ANSWER
        case Settle():
            write_word(out, frame)
            return FrameKind.SETTLE
        case Gone():
            write_word(out, frame)
            return FrameKind.GONE


def _write_cache(out: Writer, frame: CacheFrame) -> FrameKind:
    match frame:
        case Follow():
            write_follow(out, frame)
            return FrameKind.FOLLOW
        case Unfollow():
            out.u32(frame.ticket)
            return FrameKind.UNFOLLOW
        case CacheNews():
            write_cache_news(out, frame)
            return FrameKind.CACHE_NEWS


def _read(kind: FrameKind, data: Reader) -> Frame:
    match kind:
        case FrameKind.STEP:
            return read_step(data)
        case FrameKind.SUBMIT:
            return read_submit(data)
        case FrameKind.CANCEL | FrameKind.CANCEL_BY_ID | FrameKind.CANCEL_ANSWER:
            return _read_cancel(kind, data)
        case (
            FrameKind.KEEP
            | FrameKind.CLAIM
            | FrameKind.ASK
            | FrameKind.GIVE
            | FrameKind.CLAIM_ANSWER
            | FrameKind.SETTLE
            | FrameKind.GONE
        ):
            return _read_resume(kind, data)
        case FrameKind.FOLLOW | FrameKind.UNFOLLOW | FrameKind.CACHE_NEWS:
            return _read_cache(kind, data)
        case FrameKind.FRONT_HELLO:
            front_id = data.u32()
            if not 1 <= front_id <= MAX_FRONT_ID:
                raise LinkError(f"front id {front_id} is out of range")
            return FrontHello(front_id=front_id)
        case FrameKind.ENGINE_HELLO:
            return read_engine_hello(data)
        case (
            FrameKind.OBSERVER_HELLO
            | FrameKind.LOOK
            | FrameKind.LOOK_ANSWER
            | FrameKind.ORDER
            | FrameKind.ORDER_ANSWER
        ):
            return _read_look(kind, data)


def _read_look(
    kind: Literal[
        FrameKind.OBSERVER_HELLO,
        FrameKind.LOOK,
        FrameKind.LOOK_ANSWER,
        FrameKind.ORDER,
        FrameKind.ORDER_ANSWER,
    ],
    data: Reader,
) -> Frame:
    match kind:
        case FrameKind.OBSERVER_HELLO:
            return ObserverHello()
        case FrameKind.LOOK:
            return Look(ticket=data.u32())
        case FrameKind.LOOK_ANSWER:
            return read_look_answer(data)
        case FrameKind.ORDER:
            return read_order(data)
        case FrameKind.ORDER_ANSWER:
            return read_order_answer(data)


def _read_cancel(
    kind: Literal[FrameKind.CANCEL, FrameKind.CANCEL_BY_ID, FrameKind.CANCEL_ANSWER],
    data: Reader,
) -> Frame:
    match kind:
        case FrameKind.CANCEL:
            reason = FinishReason(data.u8())
            return Cancel(reason=reason, keys=data.array(data.u32(), np.int64))
        case FrameKind.CANCEL_BY_ID:
            return CancelById(ticket=data.u32(), request_id=data.text())
        case FrameKind.CANCEL_ANSWER:
            return CancelAnswer(ticket=data.u32(), state=_read_state(data))


def _read_resume(
    kind: Literal[
        FrameKind.KEEP,
        FrameKind.CLAIM,
        FrameKind.ASK,
        FrameKind.GIVE,
        FrameKind.CLAIM_ANSWER,
        FrameKind.SETTLE,
        FrameKind.GONE,
    ],
    data: Reader,
) -> Frame:
    match kind:
        case FrameKind.KEEP:
            return read_keep(data)
        case FrameKind.CLAIM:
            return read_claim(data)
        case FrameKind.ASK:
            return read_ask(data)
        case FrameKind.GIVE:
            return read_give(data)
        case FrameKind.CLAIM_ANSWER:
            return read_claim_answer(data)
        case FrameKind.SETTLE:
            return read_settle(data)
        case FrameKind.GONE:
            return read_gone(data)


def _read_cache(
    kind: Literal[FrameKind.FOLLOW, FrameKind.UNFOLLOW, FrameKind.CACHE_NEWS], data: Reader
) -> Frame:
    match kind:
        case FrameKind.FOLLOW:
            return read_follow(data)
        case FrameKind.UNFOLLOW:
            return Unfollow(ticket=data.u32())
        case FrameKind.CACHE_NEWS:
            return read_cache_news(data)


def _read_state(data: Reader) -> RequestState | None:
    value = data.u8()
    return RequestState(value) if value else None
