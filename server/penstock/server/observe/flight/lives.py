"""Reconstructs the history of each request of a recording: waits, residency in slots, end.

Owns the reconstruction from events. A ring loses its oldest rows, so a history may lack its
beginning; a recording ends while requests run, so a history may lack its end. Pure.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.flight.layout import EventKind
from penstock.server.observe.flight.reader import Recording

# Order of events with equal times.
_RANK = {
    EventKind.QUEUED: 0,
    EventKind.ADMITTED: 1,
    EventKind.PREFIX_FOUND: 2,
    EventKind.CHUNK: 3,
    EventKind.FIRST_TOKEN: 4,
    EventKind.PREEMPTED: 5,
    EventKind.FINISHED: 6,
    EventKind.FAILED: 6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Names and options of a request. `trace_id`: hexadecimal, empty for none."""

    request_id: str
    tenant: str
    trace_id: str
    priority: int
    output_index: int
    arrival_s: float
    ttft_deadline_s: float
    deadline_s: float
    num_prompt_tokens: int
    max_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class QueueInterval:
    """An interval in the queue. `end_s` is infinite while the request waits."""

    start_s: float
    end_s: float = inf
    num_ahead: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A prefill chunk computed by a step that was launched at `at_s`."""

    step: int
    at_s: float
    num_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class SlotStay:
    """An interval in the running batch. `end_s` is infinite while the request runs.

    `is_cut`: the interval began before the recording. `first_token_s`: NaN if not recorded.
    """

    slot: int
    start_s: float
    end_s: float = inf
    is_cut: bool = False
    first_token_s: float = np.nan
    chunks: list[PrefillChunk] = field(default_factory=list[PrefillChunk])


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """One output of a request. `asked`: None if its row was overwritten.

    `end`: FINISHED or FAILED with `reason` (its FinishReason or FailureReason), None while the
    output is live; `end_step` as in `layout.EVENT`. `num_output_tokens`: as of the last event with
    a count.
    """

    key: int
    asked: Asked | None
    waits: list[QueueInterval] = field(default_factory=list[QueueInterval])
    stays: list[SlotStay] = field(default_factory=list[SlotStay])
    end: EventKind | None = None
    reason: int = 0
    end_s: float = inf
    end_step: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def name(self) -> str:
        """Display name: the request's id, numbered if it has several outputs."""
        if self.asked is None:
            return f"request {self.key}"
        number = f" [{self.asked.output_index}]" if self.asked.output_index else ""
        return f"{self.asked.request_id}{number}"

    def waited_s(self, until_s: float) -> float:
        """Return the seconds in the queue, up to `until_s` if the request still waits."""
        return sum(min(wait.end_s, until_s) - wait.start_s for wait in self.waits)


def begin_s(recording: Recording) -> float:
    """Return the earliest recorded time (monotonic clock), 0 if nothing is recorded."""
    known: list[float] = []
    if len(recording.steps):
        known.append(float(recording.steps["begun_s"][0]))
    if len(recording.events):
        known.append(float(recording.events["at_s"].min()))
    return min(known, default=0.0)


def end_s(recording: Recording) -> float:
    """Return the latest known time: of the copy, or of the last step, event or launch."""
    steps, events, launch = recording.steps, recording.events, recording.last_launch
    known = [recording.copied_s]
    if len(steps):
        known.append(float(steps["updated_s"][-1]))
    if len(events):
        known.append(float(events["at_s"].max()))
    if launch is not None:
        known.append(launch.at_s)
    return max(known)


def lives_of(recording: Recording) -> list[Life]:
    """Return the history of every request with a recorded event, ordered by its first event."""
    asked = {int(row["key"]): row for row in recording.requests}
    events = recording.events
    ranks: NDArray[np.int64] = np.zeros(256, dtype=np.int64)
    for kind, rank in _RANK.items():
        ranks[kind] = rank
    order = np.lexsort((ranks[events["kind"]], events["at_s"]))
    start_s = begin_s(recording)
    lives: dict[int, Life] = {}
    for event in events[order].tolist():
        at_s, step, key, slot, count, kind, reason = event
        life = lives.get(key)
        if life is None:
            row = asked.get(key)
            life = lives[key] = Life(key=key, asked=None if row is None else _asked(row))
        _add(life, EventKind(kind), at_s, step, slot, count, reason, start_s)
    return list(lives.values())


def _add(
    life: Life,
    kind: EventKind,
    at_s: float,
    step: int,
    slot: int,
    count: int,
    reason: int,
    start_s: float,
) -> None:
    match kind:
        case EventKind.QUEUED:
            life.waits.append(QueueInterval(start_s=at_s, num_ahead=count))
        case EventKind.ADMITTED:
            _end_wait(life, at_s)
            life.stays.append(SlotStay(slot=slot, start_s=at_s))
            if not life.num_preemptions:
                life.num_cached_tokens = count
        case EventKind.PREFIX_FOUND:
            life.num_cached_tokens = count
        case EventKind.CHUNK:
            chunk = PrefillChunk(step=step, at_s=at_s, num_tokens=count)
            _stay(life, slot, at_s, start_s).chunks.append(chunk)
        case EventKind.FIRST_TOKEN:
            _stay(life, slot, at_s, start_s).first_token_s = at_s
        case EventKind.PREEMPTED:
            _stay(life, slot, at_s, start_s).end_s = at_s
            life.waits.append(QueueInterval(start_s=at_s))
            life.num_preemptions += 1
            life.num_output_tokens = count
        case EventKind.FINISHED | EventKind.FAILED:
            if slot >= 0:
                _stay(life, slot, at_s, start_s).end_s = at_s
            _end_wait(life, at_s)
            life.end, life.reason, life.end_s, life.end_step = kind, reason, at_s, step
            life.num_output_tokens = count


def _end_wait(life: Life, at_s: float) -> None:
    if life.waits and life.waits[-1].end_s == inf:
        life.waits[-1].end_s = at_s


def _stay(life: Life, slot: int, at_s: float, start_s: float) -> SlotStay:
    """Return the current residency, or add one if its admission was not recorded.

    In that case its row was overwritten, or the engine died in that step.
    """
    if not life.stays or life.stays[-1].end_s < inf:
        was_waiting = bool(life.waits) and life.waits[-1].end_s == inf
        _end_wait(life, at_s)
        stay = SlotStay(slot=slot, start_s=at_s if was_waiting else start_s, is_cut=not was_waiting)
        life.stays.append(stay)
    return life.stays[-1]


def _asked(row: Any) -> Asked:
    trace_id = bytes(row["trace_id"])
    return Asked(
        request_id=bytes(row["request_id"]).decode("utf-8", "replace"),
        tenant=bytes(row["tenant"]).decode("utf-8", "replace"),
        trace_id=trace_id.hex() if any(trace_id) else "",
        priority=int(row["priority"]),
        output_index=int(row["output_index"]),
        arrival_s=float(row["arrival_s"]),
        ttft_deadline_s=float(row["ttft_deadline_s"]),
        deadline_s=float(row["deadline_s"]),
        num_prompt_tokens=int(row["num_prompt_tokens"]),
        max_tokens=int(row["max_tokens"]),
    )
