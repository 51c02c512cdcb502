"""KEEP, CLAIM, ASK, GIVE and CLAIM_ANSWER: how a request comes from one front to another.

Owns the layout of what an engine keeps of a request that may be resumed, and of what a front gets
that goes on with it. Holds prompts and outputs: nothing of it may be logged. Does not know who
decides what.

A front tells the engine with KEEP which request outlives it. One that is asked for a request it
does not have sends CLAIM; the engine answers from what it has kept of fronts that are gone, or ASKs
all others, who GIVE it or nothing.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.server.link.wire import LinkError, Reader, Writer

_MAX_OUTPUTS = 1024


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

    `refusal`: how it ended, as JSON, where it did not end well; empty for well, or not yet.
    `ended_outputs`: those whose end is known, by index.
    """

    first_sequence: int
    messages: tuple[bytes, ...] = field(repr=False)
    is_ended: bool
    refusal: str = ""
    num_prompt_records: int = 0
    ended_outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inheritance:
    """A request that goes on elsewhere.

    `tokens`: of its outputs by index, int32 each, as far as they are known; an output that is
    missing must be generated again from its start. `log` None: it was lost.
    """

    keepsake: Keepsake
    tokens: tuple[tuple[int, NDArray[np.int32]], ...] = field(default=(), repr=False)
    log: ToldLog | None = None


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
    """A front's answer: it does not have the request any more. None: it never had."""

    ticket: int
    inheritance: Inheritance | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClaimAnswer:
    """The engine's answer to a claim; None: nobody has it."""

    ticket: int
    inheritance: Inheritance | None


ResumeFrame: TypeAlias = Keep | Claim | Ask | Give | ClaimAnswer


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
    out.u8(inheritance is not None)
    if inheritance is None:
        return
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
    return Give(ticket=data.u32(), inheritance=_read_inheritance(data))


def read_claim_answer(data: Reader) -> ClaimAnswer:
    """The body."""
    return ClaimAnswer(ticket=data.u32(), inheritance=_read_inheritance(data))


def _read_inheritance(data: Reader) -> Inheritance | None:
    if not data.u8():
        return None
    keepsake = _read_keepsake(data)
    tokens = tuple((data.u32(), data.array(data.u32(), np.int32)) for _ in range(_count(data)))
    log = _read_log(data) if data.u8() else None
    return Inheritance(keepsake=keepsake, tokens=tokens, log=log)


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


def _read_log(data: Reader) -> ToldLog:
    return ToldLog(
        first_sequence=data.u64(),
        messages=tuple(data.blob() for _ in range(data.u32())),
        is_ended=data.u8() != 0,
        refusal=data.text(),
        num_prompt_records=data.u64(),
        ended_outputs=tuple(data.u32() for _ in range(_count(data))),
    )


def _count(data: Reader) -> int:
    count = data.u32()
    if count > _MAX_OUTPUTS:
        raise LinkError(f"a request does not have {count} outputs")
    return count
