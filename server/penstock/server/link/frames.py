"""The frames between fronts, observers and the engine, and their encoding.

Owns all frames except those of a step (`step_frames.py`): hello, submission, cancellation, cached
blocks, kept streams, queries and operators' commands. Does not know sockets, and does not validate
requests: the front did.

A request that outlives its call is submitted with a `ResumeSpec`, and its engine keeps its stream.
A front takes the stream over with ATTACH. DETACH from a front means that the stream has no reader
there any more; from the engine, that another front has taken it over. Kept streams contain prompts
and outputs: never log them.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_hash import DIGEST_BYTES
from penstock.scheduler.cache_index import CacheChange
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.step_frames import StepFrame
from penstock.server.link.wire import Codec, LinkError, TaggedFrame

MAX_FRONT_ID = 2**31 - 1


TRACE_ID_BYTES = 16

_NAMES = tuple(field.name for field in fields(RequestSpec))

# All fields of RequestSpec, each optional.
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
    """What a front needs to recreate a request. `request_id`: the client's id.

    `seed`: of its first output. `deadline_s`: the earliest of its deadlines, in seconds on the
    engine's clock, like `arrival_s`. `message`: the request as its client sent it, serialised.
    """

    request_id: str
    seed: int
    arrival_s: float
    deadline_s: float
    grace_s: float
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptRequest:
    """The part of a submission that makes a request resumable.

    `name`: the engine's name of the request. `tenant`: the tenant that its bytes count for. `keys`:
    of all outputs by index, ended ones included. `is_read`: a client reads its stream. `history`:
    tokens and ends from an earlier engine, under these keys; None without any.
    """

    name: str
    resume_spec: ResumeSpec
    keys: tuple[int, ...]
    tenant: str = ""
    is_read: bool = True
    history: StepFrame | None = field(default=None, repr=False)


class AttachFailure(enum.IntEnum):
    """Why a stream cannot be attached."""

    NOT_FOUND = 0
    NOT_SETTLED = 1
    """The engine has just started: the request may not have been resubmitted yet."""
    LOST = 2
    """The request runs, but its output was too large to be kept."""


class Attach(TaggedFrame, frozen=True, kw_only=True):
    """A front takes over the stream of this request. The answer has the same `ticket`."""

    ticket: int
    name: str


class Attached(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """The engine's answer: all events of the request so far; later ones go to the requesting front.

    `keys`: of its outputs, by index. `resume_spec` None: there is no stream, for the reason
    `failure`.
    """

    ticket: int
    resume_spec: ResumeSpec | None
    keys: tuple[int, ...] = ()
    history: tuple[StepFrame, ...] = ()
    failure: AttachFailure = AttachFailure.NOT_FOUND


class Detach(TaggedFrame, frozen=True, kw_only=True):
    """The streams of these requests, by the engine's names, are detached: see the module.

    `keys`: in a frame from the engine, the outputs of the one request, since its name may have been
    reused.
    """

    names: tuple[str, ...]
    keys: tuple[int, ...] = ()


ResumeFrame: TypeAlias = Attach | Attached | Detach


class CommandKind(enum.IntEnum):
    """The commands that a process supports."""

    LOG_LEVEL = 1
    """Set the log level; the argument is its name."""
    PROFILE = 2
    """Sample the threads for the given seconds (the argument); the payload is a speedscope
    file.
    """


class ViewQuery(TaggedFrame, frozen=True, kw_only=True):
    """Query of the live requests. The answer has the same `ticket`."""

    ticket: int


class ViewAnswer(TaggedFrame, frozen=True, kw_only=True):
    """All outputs that have not ended, as the engine sees them."""

    ticket: int
    views: tuple[LiveView, ...]


class Command(TaggedFrame, frozen=True, kw_only=True):
    """An operator's command. The answer has the same `ticket`."""

    ticket: int
    kind: CommandKind
    argument: str


class CommandResult(TaggedFrame, frozen=True, kw_only=True):
    """A command's result. `problem`: why it failed, else empty; `payload`: its output."""

    ticket: int
    problem: str = ""
    payload: bytes = b""


CarryOut: TypeAlias = Callable[[Command, Callable[[CommandResult], None]], None]
"""Starts a command and passes the result to the callable, now or from another thread. Does not
block.
"""


class Follow(TaggedFrame, frozen=True, kw_only=True):
    """Subscribe to the cached blocks hashed from `salt`."""

    ticket: int
    salt: bytes


class Unfollow(TaggedFrame, frozen=True, kw_only=True):
    """End the subscription with this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """Part `index` (from 0) of a snapshot with `num_parts` parts and `num_blocks` blocks."""

    index: int
    num_parts: int
    num_blocks: int


class CacheUpdate(TaggedFrame, frozen=True, kw_only=True):
    """Changes since the last update of this ticket, in order.

    With `part`: cached blocks instead of changes; part 0 voids all earlier updates.
    """

    ticket: int
    changes: tuple[CacheChange, ...]
    part: SnapshotPart | None = None


CacheFrame: TypeAlias = Follow | Unfollow | CacheUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The outputs of one request, leader first. `kept` None: it ends with its front.

    Without outputs the request has ended, and only its stream is kept.
    """

    specs: tuple[RequestSpec, ...]
    kept: KeptRequest | None = None


class SubmitFrame(TaggedFrame, frozen=True, eq=False, tag="Submit"):
    """A `Submit` in its encoded form."""

    leader: RequestSpec | None
    others: tuple[_Difference, ...]
    kept: KeptRequest | None = None

    @classmethod
    def of(cls, submit: Submit) -> "SubmitFrame":
        """Return the frame of `submit`. Raises ValueError for an id or digest of wrong length."""
        if not submit.specs:
            return cls(None, (), submit.kept)
        leader, *others = submit.specs
        _check_lengths(submit.specs)
        return cls(leader, tuple(_difference(other, leader) for other in others), submit.kept)

    def value(self) -> Submit:
        """Return the decoded request; outputs share common parts. Raises ValueError like `of`."""
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
    """Check the lengths of ids and digests; those that outputs share only once."""
    for trace_id in {spec.trace_id for spec in specs}:
        if len(trace_id) not in (0, TRACE_ID_BYTES):
            raise ValueError(f"trace_id must be {TRACE_ID_BYTES} bytes long, not {len(trace_id)}")
    for hashes in {id(spec.block_hashes): spec.block_hashes for spec in specs}.values():
        if hashes and set(map(len, hashes)) != {DIGEST_BYTES}:
            raise ValueError(f"every block hash must be {DIGEST_BYTES} bytes long")


class FrontHello(TaggedFrame, frozen=True, kw_only=True):
    """A front's first frame: the upper half of every key it will use, 1 .. 2**31 - 1."""

    front_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRONT_ID)]


class EngineHello(TaggedFrame, frozen=True, kw_only=True):
    """An engine's first frame on every connection.

    `epoch` grows with every engine start. `max_num_waiting` and `max_num_waiting_tokens` bound its
    queue. `publishes_cache`: fronts may subscribe to its cached blocks.
    """

    epoch: int
    model: str
    executor: ExecutorInfo
    max_num_waiting: int
    max_num_waiting_tokens: int
    publishes_cache: bool = False


class ObserverHello(TaggedFrame, frozen=True, kw_only=True):
    """An observer's first frame: it has no requests and gets no step events."""


class Cancel(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """End the requests with these `keys`, int64 [n], for `reason`."""

    keys: NDArray[np.int64]
    reason: FinishReason


class CancelById(TaggedFrame, frozen=True, kw_only=True):
    """End a request of any front. The answer has the same `ticket` (32 bits)."""

    ticket: int
    request_id: str


class CancelAnswer(TaggedFrame, frozen=True, kw_only=True):
    """The state of the request of a `CancelById`, None if it is not live."""

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
    """Encode one frame, header included. Raises LinkError if it is too large."""
    match frame:
        case StepEvents():
            return _CODEC.encode(StepFrame.of(frame))
        case Submit():
            return _CODEC.encode(SubmitFrame.of(frame))
        case _:
            return _CODEC.encode(frame)


def decode(body: bytes) -> Frame:
    """Decode a body from `FrameBuffer.feed`. Raises LinkError if it is malformed."""
    frame = _CODEC.decode(body)
    if not isinstance(frame, (StepFrame, SubmitFrame)):
        return frame
    try:
        return frame.value()
    except ValueError as error:
        raise LinkError(f"a malformed frame: {error}") from error


def cancel_frame(keys: tuple[int, ...], reason: FinishReason) -> bytes:
    """Return the frame that cancels requests."""
    return encode(Cancel(keys=np.array(keys, dtype=np.int64), reason=reason))
