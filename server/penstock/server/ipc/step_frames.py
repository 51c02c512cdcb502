"""Encodes the events of one engine step as a frame, and splits them by front (gRPC server process).

Tokens are encoded as arrays, never one by one. Events that occur once per request are encoded as
the dataclasses of the engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import (
    Admitted,
    Completed,
    Failed,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.server.ipc.wire import TaggedFrame

FRONT_SHIFT = 32
"""A key is the 64-bit number of an output. Its upper half is the id of the front that has assigned
it, its owner."""
_NOTHING_MOVED: Mapping[int, int] = MappingProxyType({})


class _Logprobs(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """`TokenLogprobs` in encoded form: `chosen` and `ranks` [n], and the matrices [n, num_top]
    flattened row by row."""

    num_top: int
    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def from_logprobs(cls, logprobs: TokenLogprobs) -> "_Logprobs":
        return cls(
            logprobs.top_ids.shape[1],
            np.asarray(logprobs.chosen, np.float32),
            np.asarray(logprobs.ranks, np.int32),
            np.asarray(logprobs.top_ids, np.int32).ravel(),
            np.asarray(logprobs.top_logprobs, np.float32).ravel(),
        )

    def value(self) -> TokenLogprobs:
        shape = (len(self.chosen), self.num_top)
        if len(self.ranks) != len(self.chosen) or self.num_top < 0:
            raise ValueError("the columns of logprobs have different lengths")
        return TokenLogprobs(
            chosen=self.chosen,
            ranks=self.ranks,
            top_ids=self.top_ids.reshape(shape),
            top_logprobs=self.top_logprobs.reshape(shape),
        )


class _Change(msgspec.Struct, frozen=True, array_like=True):
    """A union of dataclasses: exactly one field is not None. msgspec unions support only
    structs."""

    queued: Queued | None = None
    admitted: Admitted | None = None
    preempted: Preempted | None = None
    prefix_found: PrefixFound | None = None

    @classmethod
    def from_change(cls, change: Queued | Admitted | Preempted | PrefixFound) -> "_Change":
        match change:
            case Queued():
                return cls(queued=change)
            case Admitted():
                return cls(admitted=change)
            case Preempted():
                return cls(preempted=change)
            case PrefixFound():
                return cls(prefix_found=change)

    def value(self) -> Queued | Admitted | Preempted | PrefixFound:
        change = self.queued or self.admitted or self.preempted or self.prefix_found
        if change is None:
            raise ValueError("an empty change")
        return change


class _End(msgspec.Struct, frozen=True, array_like=True):
    """A union of dataclasses: exactly one field is not None; see `_Change`."""

    finished: Completed | None = None
    failed: Failed | None = None

    @classmethod
    def from_end(cls, end: Completed | Failed) -> "_End":
        if isinstance(end, Completed):
            return cls(finished=end)
        if end.detail or end.request_id or end.trace_id:
            # Only the log of the engine process uses these.
            end = replace(end, detail="", request_id="", trace_id=b"")
        return cls(failed=end)

    def value(self) -> Completed | Failed:
        end = self.finished or self.failed
        if end is None:
            raise ValueError("an empty end")
        return end


class StepFrame(TaggedFrame, frozen=True, eq=False, tag="Step"):
    """The encoded form of `StepEvents`. Token `tokens[i]` was generated for the output with key
    `keys[i]`; both arrays have shape [n]. An entry of `prompt_logprobs` is (key, first position,
    logprobs)."""

    step: int
    at_s: float
    keys: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: _Logprobs | None
    prompt_logprobs: tuple[tuple[int, int, _Logprobs], ...]
    changes: tuple[_Change, ...]
    ends: tuple[_End, ...]

    @classmethod
    def from_events(cls, events: StepEvents) -> "StepFrame":
        """Return the frame of `events`."""
        return cls(
            events.step,
            events.at_s,
            np.asarray(events.keys, np.int64),
            np.asarray(events.tokens, np.int32),
            None if events.logprobs is None else _Logprobs.from_logprobs(events.logprobs),
            tuple(
                [
                    (key, at, _Logprobs.from_logprobs(rows))
                    for key, at, rows in events.prompt_logprobs
                ]
            )
            if events.prompt_logprobs
            else (),
            tuple(map(_Change.from_change, events.changes)),
            tuple(map(_End.from_end, events.ends)),
        )

    def value(self) -> StepEvents:
        """Return the decoded events. Raises ValueError if the frame is inconsistent."""
        num_tokens = len(self.keys)
        prompts = self.prompt_logprobs
        logprobs = None if self.logprobs is None else self.logprobs.value()
        if len(self.tokens) != num_tokens:
            raise ValueError(f"{len(self.tokens)} tokens for {num_tokens} keys")
        if logprobs is not None and len(logprobs.chosen) != num_tokens:
            raise ValueError(f"{len(logprobs.chosen)} logprobs for {num_tokens} tokens")
        return StepEvents(
            step=self.step,
            at_s=self.at_s,
            keys=self.keys,
            tokens=self.tokens,
            logprobs=logprobs,
            prompt_logprobs=tuple([(key, at, rows.value()) for key, at, rows in prompts])
            if prompts
            else (),
            changes=tuple([change.value() for change in self.changes]) if self.changes else (),
            ends=tuple([end.value() for end in self.ends]) if self.ends else (),
        )


def split_by_front(
    events: StepEvents, moved: Mapping[int, int] = _NOTHING_MOVED
) -> list[tuple[int, StepEvents]]:
    """Return pairs of a front id and its events of the step. Fronts without events are left out.

    `moved` maps a key to the front that receives its events instead of its owner.
    """
    token_fronts = events.keys >> FRONT_SHIFT
    if moved:
        for row, key in enumerate(events.keys.tolist()):
            token_fronts[row] = moved.get(key, token_fronts[row])

    def front_of(key: int) -> int:
        return moved.get(key, key >> FRONT_SHIFT)

    fronts: set[int] = set(token_fronts.tolist())
    for change in events.changes:
        fronts.add(front_of(change.key))
    for end in events.ends:
        fronts.add(front_of(end.key))
    for key, _, _ in events.prompt_logprobs:
        fronts.add(front_of(key))
    if len(fronts) == 1:
        return [(fronts.pop(), events)]
    return [
        (
            front,
            select_outputs(
                events,
                lambda key, front=front: front_of(key) == front,  # type: ignore[misc]
                np.flatnonzero(token_fronts == front),
            ),
        )
        for front in sorted(fronts)
    ]


def select_outputs(
    events: StepEvents, is_selected: Callable[[int], bool], rows: NDArray[np.intp]
) -> StepEvents:
    """Return the events of a step whose keys satisfy `is_selected`. `rows` [k] are the indices in
    `events.keys` of the keys that satisfy it."""
    logprobs = events.logprobs
    return replace(
        events,
        keys=events.keys[rows],
        tokens=events.tokens[rows],
        logprobs=None if logprobs is None or not len(rows) else logprobs.take(rows),
        prompt_logprobs=tuple(entry for entry in events.prompt_logprobs if is_selected(entry[0])),
        changes=tuple(change for change in events.changes if is_selected(change.key)),
        ends=tuple(end for end in events.ends if is_selected(end.key)),
    )
