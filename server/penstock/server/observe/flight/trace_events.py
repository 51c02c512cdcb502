"""Writes the Chrome trace event format, in an order that every viewer reads alike.

Owns the format: nested complete slices, counters, instants, flows bound to slices, metadata. Does
not know what is drawn. Format: "Trace Event Format", Chromium project.

Behaviour of viewers beyond the format, and the workarounds:

- A slice that exceeds its parent by a nanosecond is dropped. Times are whole nanoseconds, written
  as microseconds plus a quarter of a nanosecond, so that truncating and rounding readers agree.
  - Perfetto identifies a thread by its number alone when it is named, so numbers differ between
processes.
- A flow binds to the slice that began last on its track; at equal times slices come first, then
  flows, then nested slices. The end of a flow has `"bp": "e"`, or it would bind to the slice after
  it.
- A flow cannot bind to an async event, and async events of one name share one track: overlapping
  intervals are slices on separate lanes, so that flows can bind to them.
"""

import json
from collections.abc import Iterator
from typing import Any

_FLUSH_BYTES = 64 * 1024
_SLICE, _FLOW, _INNER, _MARK = range(4)
_MAX_TRACKS = 1_000_000


class TraceEvents:
    """Collects events; times are seconds, counted from `base_s`."""

    def __init__(self, base_s: float) -> None:
        self._base_s = base_s
        self._metadata: dict[tuple[int, int, str], dict[str, Any]] = {}
        # With their sort key: nanoseconds, rank, length.
        self._events: list[tuple[int, int, int, dict[str, Any]]] = []

    def name_process(self, pid: int, name: str) -> None:
        """Name a group of tracks; groups are ordered by `pid`."""
        self._meta("process_name", pid, 0, {"name": name})
        self._meta("process_sort_index", pid, 0, {"sort_index": pid})

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        """Name a track; idempotent. Tracks of a group are ordered by `tid`."""
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
        """A slice of at least a nanosecond on track (pid, tid); its start in nanoseconds.

        `is_inner`: nested in another slice of the track; omitted if its length is zero.
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
        """A mark on a track."""
        at = self._ns(at_s)
        self._events.append((at, _MARK, 0, {**self._event("i", track, at, name, args), "s": "t"}))

    def counter(self, pid: int, name: str, at_s: float, values: dict[str, float]) -> None:
        """Counter values from `at_s`."""
        at = self._ns(at_s)
        self._events.append((at, _MARK, 0, self._event("C", (pid, 0), at, name, values)))

    def flow(self, number: int, name: str, points: list[tuple[tuple[int, int], int]]) -> None:
        """A flow through slices: (track, nanoseconds) within each, in order of time.

        Fewer than two points draw nothing.
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
        """The whole file in pieces; `other`: metadata shown by viewers."""
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
    """The number of a track in the file, unique over all processes."""
    return pid * _MAX_TRACKS + tid


def _microseconds(num_ns: int) -> float:
    return (num_ns + 0.25) / 1e3
