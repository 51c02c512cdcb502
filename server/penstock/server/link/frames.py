"""The frames between fronts, observers and the engine, and their bytes.

Owns the hello frames and cancellation; the others have separate modules. Does not know sockets.
"""

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.link.cache_frames import CacheFrame
from penstock.server.link.operator_frames import Command, CommandResult, ViewAnswer, ViewQuery
from penstock.server.link.ports import EngineHello
from penstock.server.link.resume_frames import ResumeFrame
from penstock.server.link.spec_frames import Submit, SubmitFrame
from penstock.server.link.step_frames import StepFrame
from penstock.server.link.wire import Codec, LinkError, TaggedFrame

MAX_FRONT_ID = 2**31 - 1


class FrontHello(TaggedFrame, frozen=True, kw_only=True):
    """A front's first frame: the upper half of every key it will use, 1 .. 2**31 - 1."""

    front_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRONT_ID)]


class ObserverHello(TaggedFrame, frozen=True, kw_only=True):
    """An observer's first frame: it has no requests and gets no step events."""


class Cancel(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """End these requests with `reason`. `keys` int64 [n]."""

    keys: NDArray[np.int64]
    reason: FinishReason


class CancelById(TaggedFrame, frozen=True, kw_only=True):
    """End a request of any front; the answer has the same `ticket` (32 bits)."""

    ticket: int
    request_id: str


class CancelAnswer(TaggedFrame, frozen=True, kw_only=True):
    """The state of the request of a `CancelById`, None when it is not live."""

    ticket: int
    state: RequestState | None


_Plain: TypeAlias = (
    FrontHello
    | EngineHello
    | Cancel
    | CancelById
    | CancelAnswer
    | ObserverHello
    | ViewQuery
    | ViewAnswer
    | Command
    | CommandResult
    | ResumeFrame
    | CacheFrame
)
Frame: TypeAlias = _Plain | Submit | StepEvents

_CODEC: Codec[_Plain | SubmitFrame | StepFrame] = Codec(_Plain | SubmitFrame | StepFrame)


def encode(frame: Frame) -> bytes:
    """One frame, header included. Raises LinkError when it is too large."""
    match frame:
        case StepEvents():
            return _CODEC.encode(StepFrame.of(frame))
        case Submit():
            return _CODEC.encode(SubmitFrame.of(frame))
        case _:
            return _CODEC.encode(frame)


def decode(body: bytes) -> Frame:
    """The frame of a body from `FrameBuffer.feed`. Raises LinkError when it is malformed."""
    frame = _CODEC.decode(body)
    if not isinstance(frame, (StepFrame, SubmitFrame)):
        return frame
    try:
        return frame.value()
    except ValueError as error:
        raise LinkError(f"a malformed frame: {error}") from error
