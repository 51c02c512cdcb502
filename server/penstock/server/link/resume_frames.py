"""KEEP, CLAIM, ASK, GIVE, CLAIM_ANSWER, SETTLE, GONE: how a request comes from front to front.

Owns the layout of what an engine keeps of a request that may be resumed, and of what a front gets
that goes on with it. Holds prompts and outputs: nothing of it may be logged. Does not know who
decides what.

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

from penstock.server.link.wire import LinkError, Reader, Writer

_MAX_OUTPUTS = 1024
_SOMETHING = 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
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
    """Why there is nothing to give. The byte on the wire; 1 says that there is something."""

    NOT_THERE = 0
    UNSURE = 2
    """It cannot be said now: it is on its way, or somebody who may have it does not answer."""
    TOO_MANY = 3
    """Too many ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who has this request? `ticket` (32 bits) comes back in the answer."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The engine's question to a front: another wants this request."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Give:
    """A front's answer: of the request it has a spare copy at most from now on.

    `lack`: why there is none.
    """

    ticket: int
    inheritance: Inheritance | None
    lack: Lack = Lack.NOT_THERE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClaimAnswer:
    """The engine's answer to a claim, to be settled where there is something.

    `lack`: why there is nothing.
    """

    ticket: int
    inheritance: Inheritance | None
    lack: Lack = Lack.NOT_THERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """What became of the answer to a claim. `is_taken`: the request goes on with the claimant."""

    ticket: int
    is_taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The engine's word that a request is another front's: let go of all there is of it."""

    name: str


ResumeFrame: TypeAlias = Keep | Claim | Ask | Give | ClaimAnswer | Settle | Gone


def write_keep(out: Writer, keep: Keep) -> None:
    """Append the body."""
    out.text(keep.name)
    out.u32(len(keep.keys))
    for index, key in keep.keys:
        out.u32(index)
        out.i64(key)
    _write_keepsake(out, keep.keepsake)


def read_keep(data: Reader) -> Keep:
    """The body."""
    name = data.text()
    keys = tuple((data.u32(), data.i64()) for _ in range(_count(data)))
    return Keep(name=name, keys=keys, keepsake=_read_keepsake(data))


def write_question(out: Writer, question: Claim | Ask) -> None:
    """Append the body."""
    out.u32(question.ticket)
    out.text(question.name)


def read_claim(data: Reader) -> Claim:
    """The body."""
    return Claim(ticket=data.u32(), name=data.text())


def read_ask(data: Reader) -> Ask:
    """The body."""
    return Ask(ticket=data.u32(), name=data.text())


def write_answer(out: Writer, answer: Give | ClaimAnswer) -> None:
    """Append the body."""
    out.u32(answer.ticket)
    inheritance = answer.inheritance
    out.u8(answer.lack if inheritance is None else _SOMETHING)
    if inheritance is None:
        return
    out.u8(inheritance.is_spare)
    _write_keepsake(out, inheritance.keepsake)
    out.u32(len(inheritance.tokens))
    for index, ids in inheritance.tokens:
        out.u32(index)
        out.u32(len(ids))
        out.array(ids, np.int32)
    log = inheritance.log
    out.u8(log is not None)
    if log is not None:
        _write_log(out, log)


def read_give(data: Reader) -> Give:
    """The body."""
    ticket = data.u32()
    inheritance, lack = _read_inheritance(data)
    return Give(ticket=ticket, inheritance=inheritance, lack=lack)


def read_claim_answer(data: Reader) -> ClaimAnswer:
    """The body."""
    ticket = data.u32()
    inheritance, lack = _read_inheritance(data)
    return ClaimAnswer(ticket=ticket, inheritance=inheritance, lack=lack)


def write_word(out: Writer, word: Settle | Gone) -> None:
    """Append the body."""
    if isinstance(word, Gone):
        out.text(word.name)
        return
    out.u32(word.ticket)
    out.u8(word.is_taken)


def read_settle(data: Reader) -> Settle:
    """The body."""
    return Settle(ticket=data.u32(), is_taken=data.u8() != 0)


def read_gone(data: Reader) -> Gone:
    """The body."""
    return Gone(name=data.text())


def _read_inheritance(data: Reader) -> tuple[Inheritance | None, Lack]:
    kind = data.u8()
    if kind != _SOMETHING:
        return None, Lack(kind)
    is_spare = data.u8() != 0
    keepsake = _read_keepsake(data)
    tokens = tuple((data.u32(), data.array(data.u32(), np.int32)) for _ in range(_count(data)))
    log = _read_log(data) if data.u8() else None
    inheritance = Inheritance(keepsake=keepsake, tokens=tokens, log=log, is_spare=is_spare)
    return inheritance, Lack.NOT_THERE


def _write_keepsake(out: Writer, keepsake: Keepsake) -> None:
    out.text(keepsake.request_id)
    out.u64(keepsake.seed)
    out.f64(keepsake.arrival_s)
    out.f64(keepsake.deadline_s)
    out.f64(keepsake.grace_s)
    out.blob(keepsake.message)


def _read_keepsake(data: Reader) -> Keepsake:
    return Keepsake(
        request_id=data.text(),
        seed=data.u64(),
        arrival_s=data.f64(),
        deadline_s=data.f64(),
        grace_s=data.f64(),
        message=data.blob(),
    )


def _write_log(out: Writer, log: ToldLog) -> None:
    out.u64(log.first_sequence)
    out.u32(len(log.messages))
    for message in log.messages:
        out.blob(message)
    out.u8(log.is_ended)
    out.text(log.refusal)
    out.u64(log.num_prompt_records)
    out.u32(len(log.ended_outputs))
    for index in log.ended_outputs:
        out.u32(index)
    out.u64(log.began_at)


def _read_log(data: Reader) -> ToldLog:
    return ToldLog(
        first_sequence=data.u64(),
        messages=tuple(data.blob() for _ in range(data.u32())),
        is_ended=data.u8() != 0,
        refusal=data.text(),
        num_prompt_records=data.u64(),
        ended_outputs=tuple(data.u32() for _ in range(_count(data))),
        began_at=data.u64(),
    )


def _count(data: Reader) -> int:
    count = data.u32()
    if count > _MAX_OUTPUTS:
        raise LinkError(f"a request does not have {count} outputs")
    return count
