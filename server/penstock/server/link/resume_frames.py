"""ATTACH, ATTACHED, DETACH: move the stream of a request to the front that its client is at.

Owns the frames, and what an engine keeps of a resumable request. It contains prompts and outputs:
never log it.

A request that outlives its call is submitted with a `ResumeSpec`, and its engine keeps its stream.
A front takes the stream over with ATTACH. DETACH from a front: the stream has no reader there any
more. From the engine: another front has taken it over.
"""

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.server.link.step_frames import StepFrame
from penstock.server.link.wire import TaggedFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSpec:
    """What a front needs to recreate a request. `request_id`: the client's.

    `seed`: of its first output. `deadline_s`: the earliest of its deadlines, seconds on the
    engine's clock, as `arrival_s`. `message`: the request as its client sent it, serialised.
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

    `name`: the engine's. `tenant`: whose bytes they are. `keys`: of all outputs, those that have
    ended included, by index. `is_read`: a client reads its stream. `history`: tokens and ends that
    came of an engine before, under these keys; None where nothing did.
    """

    name: str
    resume_spec: ResumeSpec
    keys: tuple[int, ...]
    tenant: str = ""
    is_read: bool = True
    history: StepFrame | None = field(default=None, repr=False)


class AttachFailure(enum.IntEnum):
    """Why there is no stream."""

    NOT_FOUND = 0
    NOT_SETTLED = 1
    """The engine has just started: fronts may not have resubmitted it yet."""
    LOST = 2
    """The request runs, but its output was too large to be kept."""


class Attach(TaggedFrame, frozen=True, kw_only=True):
    """A front takes over the stream of this request. The answer has the same `ticket` (32 bits)."""

    ticket: int
    name: str


class Attached(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """The engine's answer: all events of the request so far; later ones go to the asking front.

    `keys`: of its outputs, by index. `resume_spec` None: there is no stream, and `failure` is why.
    """

    ticket: int
    resume_spec: ResumeSpec | None
    keys: tuple[int, ...] = ()
    history: tuple[StepFrame, ...] = ()
    failure: AttachFailure = AttachFailure.NOT_FOUND


class Detach(TaggedFrame, frozen=True, kw_only=True):
    """Detach these requests, by the engine's names: see the module.

    `keys`: from the engine, of the outputs of the one request, since its name may be in use again.
    """

    names: tuple[str, ...]
    keys: tuple[int, ...] = ()


ResumeFrame: TypeAlias = Attach | Attached | Detach
