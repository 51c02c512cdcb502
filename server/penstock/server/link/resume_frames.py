"""ATTACH, ATTACHED, DETACH: how the stream of a request comes to the front that its client is at.

Owns the frames, and the values of what an engine keeps of a request that may be resumed. Holds
prompts and outputs: nothing of it may be logged. Does not know who decides what.

A request that outlives its call is submitted with what makes it again, and its engine keeps its
stream. A front asks for that with ATTACH, and has it from then on. DETACH from a front: nobody
reads the stream there any more. From the engine: another front has it.
"""

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.server.link.step_frames import StepFrame
from penstock.server.link.wire import TaggedFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSpec:
    """What makes a request again, on any front. `request_id`: the client's.

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
    """What is submitted besides the outputs of a request that outlives its call.

    `name`: the engine's. `keys`: of all outputs, those that have ended included, by index.
    `is_read`: somebody reads its stream. `history`: tokens and ends that came of an engine before,
    under these keys; None where nothing did.
    """

    name: str
    resume_spec: ResumeSpec
    keys: tuple[int, ...]
    is_read: bool = True
    history: StepFrame | None = field(default=None, repr=False)


class AttachFailure(enum.IntEnum):
    """Why there is no stream."""

    NOT_FOUND = 0
    NOT_SETTLED = 1
    """The engine has just started: fronts may not have submitted it again yet."""
    LOST = 2
    """The request runs, and what it has generated was too much to be kept."""


class Attach(TaggedFrame, frozen=True, kw_only=True):
    """A front wants the stream of this request. `ticket` (32 bits) comes back in the answer."""

    ticket: int
    name: str


class Attached(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """The engine's answer: all that has come of the request; what comes next goes to the asker.

    `keys`: of its outputs, by index. `kept` None: there is no stream, and `failure` is why.
    """

    ticket: int
    resume_spec: ResumeSpec | None
    keys: tuple[int, ...] = ()
    history: tuple[StepFrame, ...] = ()
    failure: AttachFailure = AttachFailure.NOT_FOUND


class Detach(TaggedFrame, frozen=True, kw_only=True):
    """Of these requests, by the engine's names: see the module.

    `keys`: from the engine, of the one request's outputs: another may have its name by now.
    """

    names: tuple[str, ...]
    keys: tuple[int, ...] = ()


ResumeFrame: TypeAlias = Attach | Attached | Detach
