"""KEEP, CLAIM, ASK, GIVE, CLAIM_ANSWER, SETTLE, GONE: how a request comes from front to front.

Owns the frames, and the values of what an engine keeps of a request that may be resumed and of what
a front gets that goes on with it. Holds prompts and outputs: nothing of it may be logged. Does not
know who decides what.

A front tells the engine with KEEP which request outlives it. One that is asked for a request it
does not have sends CLAIM; the engine answers from what it has kept of fronts that are gone, or ASKs
all others, who GIVE it or nothing. Whoever gives keeps a spare copy until GONE: the claimant has
SETTLEd that it goes on there. So it survives whatever dies on the way.
"""

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.server.link.wire import TaggedFrame

OVERHEAD_BYTES = 1024
"""What a request takes besides its message, its tokens and its log, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepsake:
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


class Keep(TaggedFrame, frozen=True, kw_only=True):
    """The request of these `keys`, by output index, outlives its front. `name`: the engine's."""

    name: str
    keys: tuple[tuple[int, int], ...]
    keepsake: Keepsake


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldLog:
    """The messages that were told of a request, from `first_sequence` on.

    `began_at`: those before it were lost with a front; what is missing from there on was too much.
    `refusal`: how it ended, as JSON, where it did not end well; empty for well, or not yet.
    `ended_outputs`: those whose end is known, by index.
    """

    first_sequence: int
    messages: tuple[bytes, ...] = field(repr=False)
    is_ended: bool
    refusal: str = ""
    num_prompt_records: int = 0
    ended_outputs: tuple[int, ...] = ()
    began_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inheritance:
    """A request that goes on elsewhere.

    `tokens`: of its outputs by index, int32 each, as far as they are known; an output that is
    missing must be generated again from its start. `log` None: it was lost. `is_spare`: a copy of
    what was given away before, so that it may have gone on elsewhere since.
    """

    keepsake: Keepsake
    tokens: tuple[tuple[int, NDArray[np.int32]], ...] = field(default=(), repr=False)
    log: ToldLog | None = None
    is_spare: bool = False

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        size = OVERHEAD_BYTES + len(self.keepsake.message)
        size += sum(ids.nbytes for _, ids in self.tokens)
        return size if self.log is None else size + sum(map(len, self.log.messages))

    @property
    def next_sequence(self) -> int:
        """Of the message that follows its log; the newer of two copies has the higher one."""
        return 0 if self.log is None else self.log.first_sequence + len(self.log.messages)


class Lack(enum.IntEnum):
    """Why there is nothing to give."""

    NOT_THERE = 0
    UNSURE = 2
    """It cannot be said now: it is on its way, or somebody who may have it does not answer."""
    TOO_MANY = 3
    """Too many ask."""


class Claim(TaggedFrame, frozen=True, kw_only=True):
    """Who has this request? `ticket` (32 bits) comes back in the answer."""

    ticket: int
    name: str


class Ask(TaggedFrame, frozen=True, kw_only=True):
    """The engine's question to a front: another wants this request."""

    ticket: int
    name: str


class Give(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """A front's answer: of the request it has a spare copy at most from now on.

    `lack`: why there is none.
    """

    ticket: int
    inheritance: Inheritance | None
    lack: Lack = Lack.NOT_THERE


class ClaimAnswer(TaggedFrame, frozen=True, kw_only=True, eq=False):
    """The engine's answer to a claim, to be settled where there is something.

    `lack`: why there is nothing.
    """

    ticket: int
    inheritance: Inheritance | None
    lack: Lack = Lack.NOT_THERE


class Settle(TaggedFrame, frozen=True, kw_only=True):
    """What became of the answer to a claim. `is_taken`: the request goes on with the claimant."""

    ticket: int
    is_taken: bool


class Gone(TaggedFrame, frozen=True, kw_only=True):
    """The engine's word that a request is another front's: let go of all there is of it."""

    name: str


ResumeFrame: TypeAlias = Keep | Claim | Ask | Give | ClaimAnswer | Settle | Gone
