"""The frames between fronts (gRPC server processes), observers and the engine, and their encoding.

Defines the frames for hello (the first frame of each side), submission, cancellation, cached
blocks, kept streams, queries and operators' commands. A key is the 64-bit number of an output. The
frames of a step are in `step_frames.py`. Uses no sockets. Requests are not validated here, because
the front has validated them.

A resumable request is submitted with a `ResumeSpec`, and the engine keeps its stream. A `ticket` is
the number that links a response to its query. A front takes over a stream with `Attach`. When a
front sends `Detach`, it no longer reads the stream. When the engine sends `Detach`, another front
has taken over the stream, or the engine has dropped it. Kept streams contain prompts and outputs,
so they must not be logged.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.cache_index import CacheChange
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.output_view import OutputView
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.ipc.control_frames import SetLogLevel
from penstock.server.ipc.step_frames import StepFrame
from penstock.server.ipc.wire import Codec, FrameError, TaggedFrame

MAX_FRONT_ID = 2**31 - 1


TRACE_ID_BYTES = 16
MAX_PROFILE_S = 60.0
KEPT_TOKEN_BYTES: Final = 12
"""Measured size of one token of a kept stream or result, Python objects included."""

_NAMES = tuple(field.name for field in fields(RequestSpec))

# All fields of RequestSpec, all optional.
_make_difference: Any = msgspec.defstruct(
    "Difference",
    [
        (name, hint | msgspec.UnsetType, msgspec.UNSET)
        for name, hint in get_type_hints(RequestSpec).items()
    ],
    frozen=True,
    forbid_unknown_fields=True,
)
if TYPE_CHECKING:
    _Difference: TypeAlias = Any
else:
    _Difference = _make_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSpec:
    """The data from which a front recreates a request.

    Attributes:
        request_id: The id of the request within its tenant.
        seed: The seed of the first output.
        deadline_s: The earliest deadline of the request, in seconds on the engine's clock, as
            `arrival_s` is.
        resume_timeout_s: Seconds for which the request continues without a reader.
        message: The request message from the client, serialised.
    """

    request_id: str
    seed: int
    arrival_s: float
    deadline_s: float
    resume_timeout_s: float
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptRequest:
    """The part of a submission that makes a request resumable.

    Attributes:
        name: The engine's id of the request.
        tenant: The tenant to which the memory of the kept stream is attributed.
        keys: The keys of all outputs by output index, including ended outputs.
        is_read: True if a client reads its stream.
        history: Tokens and ends from an earlier engine, under these keys; None if there are none.
    """

    name: str
    resume_spec: ResumeSpec
    keys: tuple[int, ...]
    tenant: str = ""
    is_read: bool = True
    history: StepFrame | None = field(default=None, repr=False)


class AttachFailure(enum.IntEnum):
    """The reason why a stream cannot be attached. NOT_FOUND: the engine has no such request."""

    NOT_FOUND = 0
    NOT_SETTLED = 1
    """The engine has just started: the request may not have been resubmitted yet."""
    LOST = 2
    """The engine has dropped the events of the request, because they exceeded a limit."""


class Attach(TaggedFrame, frozen=True, kw_only=True):
    """A front's request to take over the stream of the request with the engine's id `name`. The
    response has the same `ticket`."""

    ticket: int
    name: str


class Attached(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """The engine's response to `Attach`: all events of the request so far.

    Later events go to the requesting front. `keys` are the keys of the outputs, by output index. If
    `resume_spec` is None, the stream cannot be attached, and `failure` is the reason.
    """

    ticket: int
    resume_spec: ResumeSpec | None
    keys: tuple[int, ...] = ()
    history: tuple[StepFrame, ...] = ()
    failure: AttachFailure = AttachFailure.NOT_FOUND


class Detach(TaggedFrame, frozen=True, kw_only=True):
    """The streams of these requests are detached (see the module's docstring).

    Requests are named by the engine's ids. A frame from the engine names one request and has the
    `keys` of its outputs, because the id may have been reused meanwhile.
    """

    names: tuple[str, ...]
    keys: tuple[int, ...] = ()


ResumeFrame: TypeAlias = Attach | Attached | Detach


class Profile(TaggedFrame, frozen=True, kw_only=True):
    """An operator's command to sample the stacks of a process for `seconds`, at most MAX_PROFILE_S.
    The payload of the result is a speedscope file."""

    seconds: float


Action: TypeAlias = SetLogLevel | Profile
"""An operator's command that a process can execute."""


class ViewQuery(TaggedFrame, frozen=True, kw_only=True):
    """A query for the live requests of the engine. The response has the same `ticket`."""

    ticket: int


class ViewAnswer(TaggedFrame, frozen=True, kw_only=True):
    """The response to `ViewQuery`: a view of each output that has not ended."""

    ticket: int
    views: tuple[OutputView, ...]


class Command(TaggedFrame, frozen=True, kw_only=True):
    """An operator's command. The response has the same `ticket`."""

    ticket: int
    action: Action


class CommandResult(TaggedFrame, frozen=True, kw_only=True):
    """The result of a command. `problem` is the reason for a failure, empty on success; `payload`
    is the file of a `Profile`, empty for other commands."""

    ticket: int
    problem: str = ""
    payload: bytes = b""


CarryOut: TypeAlias = Callable[[Command, Callable[[CommandResult], None]], None]
"""Starts a command without blocking. Its second argument is called with the result, before it
returns or later on another thread."""


class Follow(TaggedFrame, frozen=True, kw_only=True):
    """A request to subscribe to the cached blocks whose hash chains begin with `salt`. All requests
    with the same tenant, adapter and client salt have the same `salt`.

    `ticket` is the number of the subscription; the front chooses this number.
    """

    ticket: int
    salt: bytes


class Unfollow(TaggedFrame, frozen=True, kw_only=True):
    """A request to end the subscription with this `ticket`."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """Part `index` (from 0) of a snapshot. The whole snapshot has `num_parts` parts and
    `num_blocks` blocks."""

    index: int
    num_parts: int
    num_blocks: int


class CacheUpdate(TaggedFrame, frozen=True, kw_only=True):
    """The changes since the last update of this subscription, in order.

    If `part` is set, the update is a part of a snapshot instead, and `changes` has the cached
    blocks of this part. Part 0 invalidates all earlier updates.
    """

    ticket: int
    changes: tuple[CacheChange, ...]
    part: SnapshotPart | None = None


CacheFrame: TypeAlias = Follow | Unfollow | CacheUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The outputs of one request, in order.

    If `kept` is None, the request is cancelled when its front disconnects. Without `specs`, the
    request has already ended, and the engine only keeps its stream.
    """

    specs: tuple[RequestSpec, ...]
    kept: KeptRequest | None = None


class SubmitFrame(TaggedFrame, frozen=True, eq=False, tag="Submit"):
    """A `Submit` in its encoded form: the first output, and the differences of the others from
    it."""

    leader: RequestSpec | None
    others: tuple[_Difference, ...]
    kept: KeptRequest | None = None

    @classmethod
    def from_submit(cls, submit: Submit) -> "SubmitFrame":
        """Return the frame of `submit`. Raises ValueError if an id or a digest has the wrong
        length."""
        if not submit.specs:
            return cls(None, (), submit.kept)
        leader, *others = submit.specs
        _check_lengths(submit.specs)
        return cls(leader, tuple(_difference(other, leader) for other in others), submit.kept)

    def value(self) -> Submit:
        """Return the decoded request. Its outputs share common objects. Raises ValueError like
        `from_submit`."""
        leader = self.leader
        if leader is None:
            return Submit(specs=(), kept=self.kept)
        others = (replace(leader, **_given(other)) for other in self.others)
        specs = (leader, *others)
        _check_lengths(specs)
        return Submit(specs=specs, kept=self.kept)


def _difference(spec: RequestSpec, leader: RequestSpec) -> _Difference:
    changed: dict[str, Any] = {}
    for name in _NAMES:
        value, shared = getattr(spec, name), getattr(leader, name)
        if value is not shared and (isinstance(value, np.ndarray) or value != shared):
            changed[name] = value
    return _make_difference(**changed)


def _given(difference: _Difference) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.structs.asdict(difference)
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def _check_lengths(specs: Sequence[RequestSpec]) -> None:
    """Raise ValueError if a trace id or a block hash has the wrong length.

    Each distinct value is checked once, because the outputs of a request share most of them.
    """
    for trace_id in {spec.trace_id for spec in specs}:
        if len(trace_id) not in (0, TRACE_ID_BYTES):
            raise ValueError(f"trace_id must be {TRACE_ID_BYTES} bytes long, not {len(trace_id)}")
    for hashes in {id(spec.block_hashes): spec.block_hashes for spec in specs}.values():
        if hashes and set(map(len, hashes)) != {DIGEST_BYTES}:
            raise ValueError(f"every block hash must be {DIGEST_BYTES} bytes long")


class FrontHello(TaggedFrame, frozen=True, kw_only=True):
    """The first frame from a front. `front_id` is the upper half of all 64-bit keys of the
    front."""

    front_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRONT_ID)]


class EngineHello(TaggedFrame, frozen=True, kw_only=True):
    """The first frame from the engine on every connection.

    `epoch` increases with every engine start. `max_num_waiting` and `max_num_waiting_tokens` are
    the limits of the queue. If `publishes_cache`, fronts may subscribe to the cached blocks.
    """

    epoch: int
    model: str
    executor: ExecutorInfo
    max_num_waiting: int
    max_num_waiting_tokens: int
    publishes_cache: bool = False


class ObserverHello(TaggedFrame, frozen=True, kw_only=True):
    """The first frame from an observer. Observers submit no requests and receive no events of
    steps."""


class Cancel(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """A front's command to end the outputs with these `keys`, int64 [n], for `reason`."""

    keys: NDArray[np.int64]
    reason: FinishReason


class CancelById(TaggedFrame, frozen=True, kw_only=True):
    """A front's command to cancel a request of any front. `request_id` is the engine's id of the
    request. The response has the same `ticket`."""

    ticket: int
    request_id: str


class CancelAnswer(TaggedFrame, frozen=True, kw_only=True):
    """The response to `CancelById`. `state` is the state of the request when it was cancelled; for
    a request that had ended, its final state if its stream is kept; None if the engine does not
    have the request."""

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
    """Encode one frame, header included.

    Raises FrameError if it is too large, and ValueError if an id or a digest has the wrong length.
    """
    match frame:
        case StepEvents():
            return _CODEC.encode(StepFrame.from_events(frame))
        case Submit():
            return _CODEC.encode(SubmitFrame.from_submit(frame))
        case _:
            return _CODEC.encode(frame)


def decode(body: bytes) -> Frame:
    """Decode a body from `FrameBuffer.feed`. Raises FrameError if it is malformed."""
    frame = _CODEC.decode(body)
    if not isinstance(frame, (StepFrame, SubmitFrame)):
        return frame
    try:
        return frame.value()
    except ValueError as error:
        raise FrameError(f"a malformed frame: {error}") from error


def cancel_frame(keys: tuple[int, ...], reason: FinishReason) -> bytes:
    """Return the encoded frame that ends the outputs with these keys."""
    return encode(Cancel(keys=np.array(keys, dtype=np.int64), reason=reason))
