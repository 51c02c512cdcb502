"""Converts a flight record to a trace for ui.perfetto.dev and chrome://tracing.

Defines the tracks of the trace, in three groups. The engine: steps, planning, result processing,
and counters of blocks, requests and tokens. The slots: a slice for each interval of a request in a
slot, with prefill chunks and decode inside. The queue: a slice for each wait; overlapping slices
are on separate lanes. A flow connects each request from the queue through its slots to the step
that ended it. The functions have no side effects.

The file format is the "Trace Event Format" of the Chromium project.

Behaviour of viewers beyond the format, and the workarounds:

- A slice that exceeds its parent by a nanosecond is dropped. Times are whole nanoseconds, written
  as microseconds plus a quarter of a nanosecond, so that readers that truncate and readers that
  round get the same value.
- Perfetto identifies a named thread only by its number, so numbers must differ between processes.
- A flow binds to the slice that began last on its track. At equal times slices come first, then
  flows, then nested slices. The end of a flow has `"bp": "e"`; otherwise it would bind to the slice
  after it.
- A flow cannot bind to an async event, and async events of one name share one track. Therefore
  overlapping intervals are slices on separate lanes.
"""

import heapq
import json
from collections.abc import Iterator
from math import isfinite, isnan
from typing import Any

from penstock.scheduler.events import WaitReason
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.observe.flight.histories import (
    RequestHistory,
    SlotInterval,
    begin_s,
    end_s,
    histories_of,
)
from penstock.server.observe.flight.layout import NO_REASON, EventKind
from penstock.server.observe.flight.reader import Recording

ENGINE, SLOTS, QUEUE = 1, 2, 3
STEPS_TRACK, WORK_TRACK = (ENGINE, 1), (ENGINE, 2)
Point = tuple[tuple[int, int], int]
_NANOSECOND_S = 1e-9
_FLUSH_BYTES = 64 * 1024
_SLICE, _FLOW, _INNER, _MARK = range(4)
_MAX_TRACKS = 1_000_000


class TimelineLanes:
    """Assigns overlapping intervals to lanes (parallel tracks). Adds a lane if all lanes are
    occupied. `num` is the number of lanes."""

    def __init__(self) -> None:
        self.num = 0
        self._busy_until: list[tuple[float, int]] = []

    def assign(self, start_s: float, end_s: float) -> int:
        """Return the lane (from 0) for this interval. Call this in order of start times.

        Intervals of one lane are at least a nanosecond apart, because this is the resolution of the
        trace.
        """
        until_s = max(end_s, start_s) + 2e-9
        if self._busy_until and self._busy_until[0][0] <= start_s:
            _, lane = heapq.heapreplace(self._busy_until, (until_s, self._busy_until[0][1]))
            return lane
        lane = self.num
        self.num += 1
        heapq.heappush(self._busy_until, (until_s, lane))
        return lane


def timeline_json(recording: Recording, *, num_steps: int | None = None) -> Iterator[bytes]:
    """Return an iterator over the chunks of the trace file. If `num_steps` is set, only the last
    `num_steps` steps are included."""
    return _Timeline(recording, num_steps).draw()


def waits_for(reason: int) -> str:
    """Return the name of a WaitReason; "" for `NO_REASON`, and `reason N` for an unknown value."""
    known = {each.value: each.name for each in WaitReason}
    return "" if reason == NO_REASON else known.get(reason, f"reason {reason}")


def end_of(history: RequestHistory) -> str:
    """Return the name of the finish or failure reason of a request; "" while it is live, and
    `reason N` for an unknown value."""
    match history.end:
        case EventKind.FINISHED:
            known = {int(each): each.name for each in FinishReason}
        case EventKind.FAILED:
            known = {int(each): each.name for each in FailureReason}
        case _:
            return ""
    return known.get(history.reason, f"reason {history.reason}")


class _Timeline:
    def __init__(self, recording: Recording, num_steps: int | None) -> None:
        steps = recording.steps if num_steps is None else recording.steps[-num_steps:]
        self._recording, self._steps = recording, steps
        self._end_s = end_s(recording)
        is_part = len(steps) < len(recording.steps) and len(steps) > 0
        self._since_s = float(steps["begun_s"][0]) if is_part else begin_s(recording)
        self._trace = TraceEvents(self._since_s)
        # Two slices for each step: the time on the device, and the processing of the result.
        self._spans: dict[int, tuple[float, float, float]] = {}
        self._arrow_ends: dict[int, Point] = {}

    def draw(self) -> Iterator[bytes]:
        trace, facts = self._trace, self._recording.facts
        trace.name_process(ENGINE, f"engine {facts.model}")
        trace.name_thread(*STEPS_TRACK, "steps")
        trace.name_thread(*WORK_TRACK, "scheduler")
        trace.name_process(SLOTS, "slots")
        trace.name_process(QUEUE, "queue")
        self._draw_steps()
        self._draw_histories()
        return trace.json(
            {
                "model": facts.model,
                "executor": facts.executor,
                "engine_epoch": facts.epoch,
                "penstock": facts.version,
                "begins_unix_s": facts.unix_time_s(self._since_s),
            }
        )

    def _draw_steps(self) -> None:
        last_s = self._since_s
        names = self._steps.dtype.names or ()
        for values in self._steps.tolist():
            step: dict[str, Any] = dict(zip(names, values, strict=True))
            # With two steps in flight, the later step begins when the earlier one ends.
            start_s = max(step["begun_s"], last_s)
            last_s = max(step["collected_s"], start_s)
            self._spans[step["step"]] = (start_s, last_s, step["updated_s"])
            start = self._trace.slice(
                STEPS_TRACK, _step_name(step), start_s, last_s, _step_args(step, last_s - start_s)
            )
            end = start + max(round((last_s - start_s) * 1e9) - 1, 0)
            self._arrow_ends[step["step"]] = (STEPS_TRACK, end)
            self._trace.slice(WORK_TRACK, "plan", step["begun_s"], step["launched_s"], {})
            self._trace.slice(WORK_TRACK, "update", step["collected_s"], step["updated_s"], {})
            self._count(step)
        launch = self._recording.last_launch
        if launch is not None and launch.step not in self._spans and launch.at_s >= self._since_s:
            args = {
                "decodes": launch.num_decodes,
                "prefill_rows": launch.num_prefill_rows,
                "prefill_tokens": launch.num_prefill_tokens,
            }
            start_s = max(launch.at_s, last_s)
            name = f"step {launch.step} (never returned)"
            self._trace.slice(STEPS_TRACK, name, start_s, self._end_s, args)

    def _count(self, step: dict[str, Any]) -> None:
        counter, at_s = self._trace.counter, step["collected_s"]
        blocks = {name: step[f"num_{name}_blocks"] for name in ("used", "cached", "free")}
        counter(ENGINE, "KV blocks", at_s, blocks)
        counter(ENGINE, "running", at_s, {"requests": step["num_running"]})
        counter(ENGINE, "waiting", at_s, {"requests": step["num_waiting"]})
        tokens = {"prefill": step["num_prefill_tokens"], "out": step["num_tokens"]}
        counter(ENGINE, "tokens per step", at_s, tokens)

    def _draw_histories(self) -> None:
        histories = histories_of(self._recording)
        points = {history.key: self._draw_slot_intervals(history) for history in histories}
        self._draw_queue(histories, points)
        for number, arrow in enumerate(points.values(), 1):
            # At equal times the order is: the queue, the slot, the step.
            in_order = sorted(arrow, key=lambda point: (point[1], -point[0][0]))
            self._trace.flow(number, "request", in_order)

    def _draw_slot_intervals(self, history: RequestHistory) -> list[Point]:
        """Add the slices of the request's intervals in slots. Returns the points of its flow: one
        per slice, and the end of the step that ended the request if that is recorded."""
        points: list[Point] = []
        for number, interval in enumerate(history.slot_intervals):
            # An interval that ended at the start of the window would overlap the next interval.
            if interval.end_s - self._since_s > _NANOSECOND_S and interval.slot >= 0:
                self._trace.name_thread(SLOTS, interval.slot + 1, f"slot {interval.slot}")
                points.append(self._draw_slot_interval(history, interval, number))
        self._arrow_to_end(history, points)
        return points

    def _draw_queue(self, histories: list[RequestHistory], points: dict[int, list[Point]]) -> None:
        lanes = TimelineLanes()
        waits: list[tuple[float, float, RequestHistory, int]] = []
        for history in histories:
            spans = [(wait.start_s, wait.end_s) for wait in history.waits]
            if not history.waits and not history.slot_intervals:
                # It was rejected at admission, or only its end is recorded.
                spans = [(history.end_s, history.end_s)]
            for number, (start_s, until_s) in enumerate(spans):
                if until_s >= self._since_s:
                    waits.append((start_s, until_s, history, number))
        for start_s, until_s, history, number in sorted(waits, key=lambda wait: wait[0]):
            points[history.key].append(self._draw_wait(history, number, start_s, until_s, lanes))
        for lane in range(lanes.num):
            self._trace.name_thread(QUEUE, lane + 1, f"lane {lane}")

    def _draw_wait(
        self,
        history: RequestHistory,
        number: int,
        start_s: float,
        until_s: float,
        lanes: TimelineLanes,
    ) -> Point:
        start_s, until_s = max(start_s, self._since_s), min(until_s, self._end_s)
        track = (QUEUE, lanes.assign(start_s, until_s) + 1)
        args = _request_args(history)
        if number < len(history.waits) and history.waits[number].num_ahead is not None:
            args["ahead"] = history.waits[number].num_ahead
        args["again"] = number > 0
        start = self._trace.slice(track, history.name, start_s, until_s, args)
        if history.end is not None and history.end_s <= until_s:
            # It was never admitted, or not admitted again.
            self._trace.instant(track, end_of(history), history.end_s, {"request_id": history.name})
        return track, start

    def _draw_slot_interval(
        self, history: RequestHistory, interval: SlotInterval, number: int
    ) -> Point:
        track = (SLOTS, interval.slot + 1)
        start_s, until_s = max(interval.start_s, self._since_s), min(interval.end_s, self._end_s)
        args = _request_args(history)
        is_last = number == len(history.slot_intervals) - 1
        args |= {
            "cached_tokens": history.num_cached_tokens,
            "residency": number + 1,
            "ended": (end_of(history) or "not yet") if is_last and history.end else "",
        }
        if not is_last or (history.end is None and interval.end_s <= self._end_s):
            args["ended"] = "PREEMPTED"
            self._trace.instant(track, "preempted", until_s, {"request_id": history.name})
        elif history.end is None:
            args["ended"] = "still running"
        if interval.is_cut:
            args["began"] = "before the recording"
        start = self._trace.slice(track, history.name, start_s, until_s, args)
        self._draw_phases(track, interval, start_s, until_s)
        if is_last and history.end is EventKind.FAILED and interval.end_s <= self._end_s:
            self._trace.instant(track, end_of(history), until_s, {"request_id": history.name})
        return track, start

    def _draw_phases(
        self, track: tuple[int, int], interval: SlotInterval, start_s: float, until_s: float
    ) -> None:
        last_s = start_s
        for chunk in interval.chunks:
            # It is in flight at the end of the recording, unless its step has returned.
            span = self._spans.get(chunk.step)
            step_end_s = self._end_s if span is None else span[1]
            from_s, to_s = max(chunk.at_s, last_s), min(step_end_s, until_s)
            if to_s > from_s:
                args = {"tokens": chunk.num_tokens, "step": chunk.step}
                self._trace.slice(track, "prefill", from_s, to_s, args, is_inner=True)
                last_s = to_s
        decode_s = interval.first_token_s
        if interval.is_cut and isnan(decode_s) and not interval.chunks:
            decode_s = start_s
        decode_s = max(decode_s, last_s)
        if until_s > decode_s:
            self._trace.slice(track, "decode", decode_s, until_s, {}, is_inner=True)

    def _arrow_to_end(self, history: RequestHistory, points: list[Point]) -> None:
        """Append the end of the step that ended the request to the points of the flow, if the step
        is recorded and the flow has points."""
        span, end = self._spans.get(history.end_step), self._arrow_ends.get(history.end_step)
        if history.end is None or span is None or end is None or not points:
            return
        if span[0] <= history.end_s <= span[2] and points[-1][1] <= end[1]:
            points.append(end)


def _step_name(step: dict[str, Any]) -> str:
    parts = [f"{step['num_prefill_tokens']} prefill"] if step["num_prefill_rows"] else []
    parts += [f"{step['num_decodes']} decode"] if step["num_decodes"] else []
    return " + ".join(parts) or "no rows"


def _step_args(step: dict[str, Any], measured_s: float) -> dict[str, Any]:
    args: dict[str, Any] = {
        "step": step["step"],
        "decodes": step["num_decodes"],
        "prefill_rows": step["num_prefill_rows"],
        "prefill_tokens": step["num_prefill_tokens"],
        "context_tokens": step["num_context_tokens"],
        "tokens_out": step["num_tokens"],
        "measured_ms": round(measured_s * 1e3, 4),
        "waits_for": waits_for(step["waits_for"]) or "nothing",
    }
    for name in ("running", "waiting", "waiting_tokens"):
        args[name] = step[f"num_{name}"]
    for name in ("admitted", "preempted", "finished", "failed"):
        if step[f"num_{name}"]:
            args[name] = step[f"num_{name}"]
    if isfinite(step["predicted_s"]):
        args["predicted_ms"] = round(step["predicted_s"] * 1e3, 4)
    return args


def _request_args(history: RequestHistory) -> dict[str, Any]:
    if history.details is None:
        return {"key": history.key}
    details = history.details
    args: dict[str, Any] = {
        "request_id": details.request_id,
        "tenant": details.tenant,
        "trace_id": details.trace_id,
        "priority": details.priority,
        "prompt_tokens": details.num_prompt_tokens,
        "max_tokens": details.max_tokens,
        "output_tokens": history.num_output_tokens,
        "preemptions": history.num_preemptions,
    }
    for name, at_s in (
        ("ttft_deadline_s", details.ttft_deadline_s),
        ("deadline_s", details.deadline_s),
    ):
        if isfinite(at_s):
            args[name] = round(at_s - details.arrival_s, 6)
    return args


class TraceEvents:
    """Collects trace events. Times in arguments are seconds on the recording's clock; the file has
    times since `base_s`, in microseconds."""

    def __init__(self, base_s: float) -> None:
        self._base_s = base_s
        self._metadata: dict[tuple[int, int, str], dict[str, Any]] = {}
        # The events with their sort keys: nanoseconds, rank, length.
        self._events: list[tuple[int, int, int, dict[str, Any]]] = []

    def name_process(self, pid: int, name: str) -> None:
        """Name the group of tracks (process) `pid`. Viewers order groups by `pid`."""
        self._meta("process_name", pid, 0, {"name": name})
        self._meta("process_sort_index", pid, 0, {"sort_index": pid})

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        """Name track (pid, tid). Idempotent. Viewers order the tracks of a group by `tid`."""
        self._meta("thread_name", pid, tid, {"name": name})
        self._meta("thread_sort_index", pid, tid, {"sort_index": tid})

    def slice(
        self,
        track: tuple[int, int],
        name: str,
        start_s: float,
        end_s: float,
        args: dict[str, Any],
        *,
        is_inner: bool = False,
    ) -> int:
        """Add a slice of at least 1 ns on track (pid, tid) and return its start in nanoseconds
        since `base_s`.

        If `is_inner`, it is nested in another slice of the track, and is left out if its length is
        zero.
        """
        start, end = self._ns(start_s), self._ns(end_s)
        if is_inner and end <= start:
            return start
        length = max(end - start, 1)
        event = self._event("X", track, start, name, args)
        event["dur"] = _microseconds(length)
        self._events.append((start, _INNER if is_inner else _SLICE, -length, event))
        return start

    def instant(self, track: tuple[int, int], name: str, at_s: float, args: dict[str, Any]) -> None:
        """Add an instant event to track (pid, tid)."""
        at = self._ns(at_s)
        self._events.append((at, _MARK, 0, {**self._event("i", track, at, name, args), "s": "t"}))

    def counter(self, pid: int, name: str, at_s: float, values: dict[str, float]) -> None:
        """Add counter values, by name, that apply from `at_s` on."""
        at = self._ns(at_s)
        self._events.append((at, _MARK, 0, self._event("C", (pid, 0), at, name, values)))

    def flow(self, number: int, name: str, points: list[tuple[tuple[int, int], int]]) -> None:
        """Add a flow through slices: one point (track, nanoseconds since `base_s`) in each slice,
        in order of time.

        With fewer than two points, nothing is added.
        """
        if len(points) < 2:
            return
        for place, (track, at) in enumerate(points):
            phase = "s" if not place else "f" if place == len(points) - 1 else "t"
            event = self._event(phase, track, at, name, None)
            event |= {"id": number, "cat": "request"}
            if phase == "f":
                event["bp"] = "e"
            self._events.append((at, _FLOW, place, event))

    def json(self, other: dict[str, Any]) -> Iterator[bytes]:
        """Yield the file as chunks of JSON. `other` is metadata that viewers display."""
        self._events.sort(key=lambda event: event[:3])
        head = json.dumps({"displayTimeUnit": "ms", "otherData": other}, allow_nan=False)
        pieces = bytearray(f'{head[:-1]}, "traceEvents": [\n'.encode())
        separator = b""
        events = (event[3] for event in self._events)
        for source in (self._metadata.values(), events):
            for event in source:
                pieces += separator
                pieces += json.dumps(event, allow_nan=False).encode()
                separator = b",\n"
                if len(pieces) >= _FLUSH_BYTES:
                    yield bytes(pieces)
                    pieces.clear()
        yield bytes(pieces) + b"\n]}\n"

    def _ns(self, at_s: float) -> int:
        return max(0, round((at_s - self._base_s) * 1e9))

    def _meta(self, name: str, pid: int, tid: int, args: dict[str, Any]) -> None:
        self._metadata[pid, tid, name] = {
            "ph": "M",
            "pid": pid,
            "tid": _thread(pid, tid),
            "name": name,
            "args": args,
        }

    def _event(
        self, phase: str, track: tuple[int, int], at: int, name: str, args: dict[str, Any] | None
    ) -> dict[str, Any]:
        event: dict[str, Any] = {
            "ph": phase,
            "pid": track[0],
            "tid": _thread(*track),
            "ts": _microseconds(at),
            "name": name,
        }
        return event if args is None else {**event, "args": args}


def _thread(pid: int, tid: int) -> int:
    """Return the number of a track in the file, unique over all processes."""
    return pid * _MAX_TRACKS + tid


def _microseconds(num_ns: int) -> float:
    return (num_ns + 0.25) / 1e3
