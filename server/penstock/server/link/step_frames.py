"""STEP: what one step did, as bytes, and split by the front it concerns.

Owns the layout of `StepEvents`. Tokens travel as arrays, never one by one; records of single
requests are few and packed. Does not know who reads them.
"""

import math
import struct
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    PrefixFound,
    Queued,
    Stay,
    StepEvents,
    Wait,
)
from penstock.scheduler.quotas import QuotaBreach, QuotaKind
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.link.wire import LinkError, Reader, Writer

FRONT_SHIFT = 32
"""A key's upper half is the id of the front that owns it."""

_STEP = struct.Struct("<qdIIII")
# kind, key, at_s, two numbers (meaning by kind)
_CHANGE = struct.Struct("<Bqdqq")
_END = struct.Struct("<BqdBq")
# Behind the record of a failure: estimate_s, deadline_s, retry_after_s, chance
_REFUSAL = struct.Struct("<dddd")
# And of one that breaks a quota: which limit, how much it is, retry_after_s
_BREACH = struct.Struct("<Bqd")
# Behind that of whoever waited: seconds by reason, others, num_passed_by
_WAIT = struct.Struct("<dddddI")
# And of whoever ran: num_chunks, num_steps, least and greatest batch
_STAY = struct.Struct("<IIII")
_ADMITTED, _PREEMPTED, _PREFIX_FOUND, _QUEUED = 1, 2, 3, 4
_FINISHED, _FAILED = 1, 2
# In the byte of the kind: which of them follow.
_HAS_WAIT, _HAS_STAY, _HAS_BREACH = 16, 32, 64
_KIND = 15
_UNKNOWN_S = math.nan
"""Stands for None among seconds and chances."""

_Change = Queued | Admitted | Preempted | PrefixFound


def split_by_front(events: StepEvents) -> list[tuple[int, StepEvents]]:
    """The step's news by front id, each front only its own; fronts without news are left out."""
    token_fronts = events.keys >> FRONT_SHIFT
    fronts: set[int] = set(np.unique(token_fronts).tolist())
    fronts.update(change.key >> FRONT_SHIFT for change in events.changes)
    fronts.update(end.key >> FRONT_SHIFT for end in events.ends)
    fronts.update(key >> FRONT_SHIFT for key, _, _ in events.prompt_logprobs)
    if len(fronts) == 1:
        return [(fronts.pop(), events)]
    return [(front, _only(events, front, token_fronts)) for front in sorted(fronts)]


def _only(events: StepEvents, front: int, token_fronts: NDArray[np.int64]) -> StepEvents:
    rows = np.flatnonzero(token_fronts == front)
    logprobs = events.logprobs
    return replace(
        events,
        keys=events.keys[rows],
        tokens=events.tokens[rows],
        logprobs=None if logprobs is None or not len(rows) else logprobs.take(rows),
        prompt_logprobs=tuple(
            entry for entry in events.prompt_logprobs if entry[0] >> FRONT_SHIFT == front
        ),
        changes=tuple(c for c in events.changes if c.key >> FRONT_SHIFT == front),
        ends=tuple(end for end in events.ends if end.key >> FRONT_SHIFT == front),
    )


def write_step(out: Writer, events: StepEvents) -> None:
    """Append the body."""
    if len(events.keys) != len(events.tokens):
        raise LinkError(f"{len(events.tokens)} tokens for {len(events.keys)} keys")
    out.packed(
        _STEP,
        events.step,
        events.at_s,
        len(events.keys),
        len(events.changes),
        len(events.ends),
        len(events.prompt_logprobs),
    )
    out.array(events.keys, np.int64)
    out.array(events.tokens, np.int32)
    out.u8(events.logprobs is not None)
    if events.logprobs is not None:
        _write_logprobs(out, events.logprobs)
    for key, first, logprobs in events.prompt_logprobs:
        out.i64(key)
        out.i64(first)
        _write_logprobs(out, logprobs)
    for change in events.changes:
        _write_change(out, change)
    for end in events.ends:
        _write_end(out, end)


def read_step(data: Reader) -> StepEvents:
    """The body's events."""
    step, at_s, num_tokens, num_changes, num_ends, num_prompts = data.packed(_STEP)
    keys = data.array(int(num_tokens), np.int64)
    tokens = data.array(int(num_tokens), np.int32)
    logprobs = _read_logprobs(data) if data.u8() else None
    if logprobs is not None and len(logprobs.chosen) != len(keys):
        raise LinkError(f"{len(logprobs.chosen)} logprobs for {len(keys)} tokens")
    return StepEvents(
        step=int(step),
        at_s=at_s,
        keys=keys,
        tokens=tokens,
        logprobs=logprobs,
        prompt_logprobs=tuple(
            (data.i64(), data.i64(), _read_logprobs(data)) for _ in range(int(num_prompts))
        ),
        changes=tuple(_read_change(data) for _ in range(int(num_changes))),
        ends=tuple(_read_end(data) for _ in range(int(num_ends))),
    )


def _write_logprobs(out: Writer, logprobs: TokenLogprobs) -> None:
    num_rows, width = logprobs.top_ids.shape
    out.u32(num_rows)
    out.u32(width)
    out.array(logprobs.chosen, np.float32)
    out.array(logprobs.ranks, np.int32)
    out.array(logprobs.top_ids, np.int32)
    out.array(logprobs.top_logprobs, np.float32)


def _read_logprobs(data: Reader) -> TokenLogprobs:
    num_rows, width = data.u32(), data.u32()
    return TokenLogprobs(
        chosen=data.array(num_rows, np.float32),
        ranks=data.array(num_rows, np.int32),
        top_ids=data.matrix(num_rows, width, np.int32),
        top_logprobs=data.matrix(num_rows, width, np.float32),
    )


def _write_change(out: Writer, change: _Change) -> None:
    match change:
        case Queued():
            out.packed(_CHANGE, _QUEUED, change.key, change.at_s, change.num_ahead, 0)
            out.f64(_or_unknown(change.estimated_queue_s))
        case Admitted():
            out.packed(
                _CHANGE,
                _ADMITTED | _flags(change.wait, None),
                change.key,
                change.at_s,
                change.num_cached_tokens,
                change.num_preemptions,
            )
            _write_account(out, change.wait, None)
        case Preempted():
            kind = _PREEMPTED | _flags(None, change.stay)
            out.packed(_CHANGE, kind, change.key, change.at_s, 0, 0)
            _write_account(out, None, change.stay)
        case PrefixFound():
            out.packed(_CHANGE, _PREFIX_FOUND, change.key, change.at_s, change.num_cached_tokens, 0)


def _read_change(data: Reader) -> _Change:
    record = data.packed(_CHANGE)
    flags, key, count, num_preemptions = cast("tuple[int, ...]", (*record[:2], *record[3:]))
    kind = flags & _KIND
    wait, stay = _read_account(data, flags)
    if kind == _QUEUED:
        return Queued(
            key=key,
            at_s=record[2],
            num_ahead=count,
            estimated_queue_s=_if_known(data.f64()),
        )
    if kind == _ADMITTED:
        return Admitted(
            key=key,
            at_s=record[2],
            num_cached_tokens=count,
            num_preemptions=num_preemptions,
            wait=wait,
        )
    if kind == _PREEMPTED:
        return Preempted(key=key, at_s=record[2], stay=stay)
    if kind == _PREFIX_FOUND:
        return PrefixFound(key=key, at_s=record[2], num_cached_tokens=count)
    raise LinkError(f"unknown change {kind}")


def _write_end(out: Writer, end: Finished | Failed) -> None:
    flags = _flags(end.wait, end.stay)
    match end:
        case Finished():
            out.packed(_END, _FINISHED | flags, end.key, end.at_s, end.reason, end.stop_id)
            _write_account(out, end.wait, end.stay)
        case Failed():
            flags |= _FAILED if end.breach is None else _FAILED | _HAS_BREACH
            out.packed(_END, flags, end.key, end.at_s, end.reason, 0)
            _write_account(out, end.wait, end.stay)
            told = (end.estimate_s, end.deadline_s, end.retry_after_s, end.chance)
            out.packed(_REFUSAL, *map(_or_unknown, told))
            if end.breach is not None:
                breach = end.breach
                out.packed(_BREACH, breach.kind, breach.limit, _or_unknown(breach.retry_after_s))


def _read_end(data: Reader) -> Finished | Failed:
    record = data.packed(_END)
    flags, key, reason, stop_id = cast("tuple[int, ...]", (*record[:2], *record[3:]))
    kind = flags & _KIND
    # Only a refusal can have one.
    wait, stay = _read_account(data, flags & ~_HAS_BREACH if kind == _FAILED else flags)
    if kind == _FINISHED:
        return Finished(
            key=key,
            at_s=record[2],
            reason=FinishReason(reason),
            stop_id=stop_id,
            wait=wait,
            stay=stay,
        )
    if kind == _FAILED:
        estimate_s, deadline_s, retry_after_s, chance = map(_if_known, data.packed(_REFUSAL))
        return Failed(
            key=key,
            at_s=record[2],
            reason=FailureReason(reason),
            estimate_s=estimate_s,
            deadline_s=deadline_s,
            retry_after_s=retry_after_s,
            chance=chance,
            breach=_read_breach(data) if flags & _HAS_BREACH else None,
            wait=wait,
            stay=stay,
        )
    raise LinkError(f"unknown end {kind}")


def _read_breach(data: Reader) -> QuotaBreach:
    kind, limit, retry_after_s = data.packed(_BREACH)
    return QuotaBreach(
        kind=QuotaKind(int(kind)), limit=int(limit), retry_after_s=_if_known(retry_after_s)
    )


def _flags(wait: Wait | None, stay: Stay | None) -> int:
    return (0 if wait is None else _HAS_WAIT) | (0 if stay is None else _HAS_STAY)


def _write_account(out: Writer, wait: Wait | None, stay: Stay | None) -> None:
    if wait is not None:
        out.packed(
            _WAIT,
            wait.blocks_s,
            wait.slots_s,
            wait.token_budget_s,
            wait.fairness_s,
            wait.other_s,
            wait.num_passed_by,
        )
    if stay is not None:
        sizes = (stay.min_batch_size, stay.max_batch_size)
        out.packed(_STAY, stay.num_chunks, stay.num_steps, *sizes)


def _read_account(data: Reader, flags: int) -> tuple[Wait | None, Stay | None]:
    if flags & ~(_KIND | _HAS_WAIT | _HAS_STAY):
        raise LinkError(f"unknown flags of a change or an end: {flags}")
    wait: Wait | None = None
    stay: Stay | None = None
    if flags & _HAS_WAIT:
        blocks_s, slots_s, token_budget_s, fairness_s, other_s, num = data.packed(_WAIT)
        wait = Wait(
            blocks_s=blocks_s,
            slots_s=slots_s,
            token_budget_s=token_budget_s,
            fairness_s=fairness_s,
            other_s=other_s,
            num_passed_by=int(num),
        )
    if flags & _HAS_STAY:
        num_chunks, num_steps, least, greatest = cast("tuple[int, ...]", data.packed(_STAY))
        stay = Stay(
            num_chunks=num_chunks,
            num_steps=num_steps,
            min_batch_size=least,
            max_batch_size=greatest,
        )
    return wait, stay


def _or_unknown(duration_s: float | None) -> float:
    return _UNKNOWN_S if duration_s is None else duration_s


def _if_known(duration_s: float) -> float | None:
    return None if math.isnan(duration_s) else duration_s
