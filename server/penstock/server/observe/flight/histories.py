"""Reconstructs the history of each request in a flight record: when it waited in the queue, when
it was in a slot, and how it ended.

Uses the recorded events. A ring buffer loses its oldest rows, so the beginning of a history may be
missing. A recording may end while requests run, so the end of a history may be missing. The
functions have no side effects.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.flight.layout import EventKind
from penstock.server.observe.flight.reader import Recording

# Order of events that have equal times.
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
class RequestDetails:
    """The ids and options of a request. `trace_id` is hexadecimal, empty if there is none.

    Arrival and deadlines are seconds on the monotonic clock; a deadline is infinite if there is
    none.
    """

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
    """A time interval in which a request waits in the queue. `end_s` is infinite while it waits.

    `num_ahead` is the number of requests that were queued ahead of this one; None after a
    preemption.
    """

    start_s: float
    end_s: float = inf
    num_ahead: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChunk:
    """A chunk of a prefill: the `num_tokens` tokens that step `step`, launched at `at_s`,
    computes."""

    step: int
    at_s: float
    num_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class SlotInterval:
    """A time interval in which a request has a slot of the batch. `end_s` is infinite while it
    runs.

    `is_cut` is True if the interval began before the recording. `first_token_s` is NaN if it was
    not recorded.
    """

    slot: int
    start_s: float
    end_s: float = inf
    is_cut: bool = False
    first_token_s: float = np.nan
    chunks: list[RecordedChunk] = field(default_factory=list[RecordedChunk])


@dataclass(slots=True, kw_only=True, eq=False)
class RequestHistory:
    """The history of one output of a request. `key` is the number of the output in the engine.

    `details` has the ids and options of the request, None if their row was overwritten. `end` is
    FINISHED or FAILED, None while the output is live. `reason` is the value of its FinishReason or
    FailureReason. `end_step` is the last step whose result was processed when the output ended.
    `num_output_tokens` is the count in the last PREEMPTED, FINISHED or FAILED event, 0 without one.
    """

    key: int
    details: RequestDetails | None
    waits: list[QueueInterval] = field(default_factory=list[QueueInterval])
    slot_intervals: list[SlotInterval] = field(default_factory=list[SlotInterval])
    end: EventKind | None = None
    reason: int = 0
    end_s: float = inf
    end_step: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def name(self) -> str:
        """Display name: the request id, with the index of the output unless it is 0; the key if the
        id is unknown."""
        if self.details is None:
            return f"request {self.key}"
        number = f" [{self.details.output_index}]" if self.details.output_index else ""
        return f"{self.details.request_id}{number}"

    def waited_s(self, until_s: float) -> float:
        """Return the total time in the queue in seconds; a wait that has not ended counts up to
        `until_s`."""
        return sum(min(wait.end_s, until_s) - wait.start_s for wait in self.waits)


def begin_s(recording: Recording) -> float:
    """Return the time of the earliest recorded step or event, in seconds on the monotonic clock; 0
    if there is none."""
    known: list[float] = []
    if len(recording.steps):
        known.append(float(recording.steps["begun_s"][0]))
    if len(recording.events):
        known.append(float(recording.events["at_s"].min()))
    return min(known, default=0.0)


def end_s(recording: Recording) -> float:
    """Return the latest recorded time, in seconds on the monotonic clock.

    It is the latest of four times: of the copy, the last step, the last event and the last launch.
    """
    steps, events, launch = recording.steps, recording.events, recording.last_launch
    known = [recording.copied_s]
    if len(steps):
        known.append(float(steps["updated_s"][-1]))
    if len(events):
        known.append(float(events["at_s"].max()))
    if launch is not None:
        known.append(launch.at_s)
    return max(known)


def histories_of(recording: Recording) -> list[RequestHistory]:
    """Return the history of every output with a recorded event, ordered by its first event."""
    rows = {int(row["key"]): row for row in recording.requests}
    events = recording.events
    ranks: NDArray[np.int64] = np.zeros(256, dtype=np.int64)
    for kind, rank in _RANK.items():
        ranks[kind] = rank
    order = np.lexsort((ranks[events["kind"]], events["at_s"]))
    start_s = begin_s(recording)
    histories: dict[int, RequestHistory] = {}
    for event in events[order].tolist():
        at_s, step, key, slot, count, kind, reason = event
        history = histories.get(key)
        if history is None:
            row = rows.get(key)
            history = histories[key] = RequestHistory(
                key=key, details=None if row is None else _details_of(row)
            )
        _add(history, EventKind(kind), at_s, step, slot, count, reason, start_s)
    return list(histories.values())


def _add(
    history: RequestHistory,
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
            history.waits.append(QueueInterval(start_s=at_s, num_ahead=count))
        case EventKind.ADMITTED:
            _end_wait(history, at_s)
            history.slot_intervals.append(SlotInterval(slot=slot, start_s=at_s))
            if not history.num_preemptions:
                history.num_cached_tokens = count
        case EventKind.PREFIX_FOUND:
            history.num_cached_tokens = count
        case EventKind.CHUNK:
            chunk = RecordedChunk(step=step, at_s=at_s, num_tokens=count)
            _slot_interval(history, slot, at_s, start_s).chunks.append(chunk)
        case EventKind.FIRST_TOKEN:
            _slot_interval(history, slot, at_s, start_s).first_token_s = at_s
        case EventKind.PREEMPTED:
            _slot_interval(history, slot, at_s, start_s).end_s = at_s
            history.waits.append(QueueInterval(start_s=at_s))
            history.num_preemptions += 1
            history.num_output_tokens = count
        case EventKind.FINISHED | EventKind.FAILED:
            if slot >= 0:
                _slot_interval(history, slot, at_s, start_s).end_s = at_s
            _end_wait(history, at_s)
            history.end, history.reason, history.end_s, history.end_step = kind, reason, at_s, step
            history.num_output_tokens = count


def _end_wait(history: RequestHistory, at_s: float) -> None:
    if history.waits and history.waits[-1].end_s == inf:
        history.waits[-1].end_s = at_s


def _slot_interval(history: RequestHistory, slot: int, at_s: float, start_s: float) -> SlotInterval:
    """Return the current interval in a slot. Adds one if the admission was not recorded.

    An admission is missing if its row was overwritten, or if the engine died in that step.
    """
    if not history.slot_intervals or history.slot_intervals[-1].end_s < inf:
        was_waiting = bool(history.waits) and history.waits[-1].end_s == inf
        _end_wait(history, at_s)
        interval = SlotInterval(
            slot=slot, start_s=at_s if was_waiting else start_s, is_cut=not was_waiting
        )
        history.slot_intervals.append(interval)
    return history.slot_intervals[-1]


def _details_of(row: Any) -> RequestDetails:
    trace_id = bytes(row["trace_id"])
    return RequestDetails(
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
