"""Draws a flight record in the style of Perfetto: the steps, the counters, the slots and the
queue, with arrows between the slices of each highlighted request.

Its input is the Chrome trace (JSON) that `penstock timeline` writes. Does no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from picture_svg import (
    AMBER,
    BAND,
    BLUE,
    GREY,
    INK,
    ORANGE,
    QUIET,
    RED,
    VIOLET,
    Drawing,
    seconds,
    ticks,
)

WIDTH = 1180
_STEPS, _SLOTS, _QUEUE = "steps", "slots", "queue"
_LEFT, _RIGHT = 104.0, WIDTH - 16.0
_SLOT, _LANE, _AREA = 19.0, 13.0, 44.0
_PALE = 0.32
_CHAR = 5.6
"""Approximate width of a character of a slice's name."""
_NO_STEP = "never returned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice of a track of the trace; times are seconds since the start of the recording."""

    track: tuple[int, int]
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


@dataclass(slots=True)
class Timeline:
    """The events of a Chrome trace, grouped by kind. A track is a pair of process id and thread id.

    Attributes:
        names: Names of tracks.
        groups: Names of track groups, by process id.
        counters: The samples of each counter, by its name: time in seconds, and values by series.
        arrows: The flow events, drawn as arrows, by the flow's id: track, and time in seconds.
        marks: Instant events: track, name, and time in seconds.
    """

    names: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    groups: dict[int, str] = field(default_factory=dict[int, str])
    slices: list[Slice] = field(default_factory=list[Slice])
    counters: dict[str, list[tuple[float, dict[str, float]]]] = field(
        default_factory=dict[str, list[tuple[float, dict[str, float]]]]
    )
    arrows: dict[int, list[tuple[tuple[int, int], float]]] = field(
        default_factory=dict[int, list[tuple[tuple[int, int], float]]]
    )
    marks: list[tuple[tuple[int, int], str, float]] = field(
        default_factory=list[tuple[tuple[int, int], str, float]]
    )

    def on(self, name: str) -> list[Slice]:
        """Return the slices of the track or the group of tracks that has this name."""
        return [
            each
            for each in self.slices
            if name in (self.names.get(each.track), self.groups.get(each.track[0]))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How to draw a recording.

    `highlighted`: the requests that are highlighted and have arrows; if empty, all are highlighted,
    without arrows. `tenants` has the colour of each tenant's decodes, `max_lanes` is the maximum
    number of lanes of the queue, and `areas` are the counters to draw.
    """

    title: str
    highlighted: tuple[str, ...] = ()
    tenants: Mapping[str, str] = field(default_factory=dict[str, str])
    max_lanes: int = 12
    areas: tuple[str, ...] = ("KV blocks", "waiting")


def timeline_of(trace: Mapping[str, Any]) -> Timeline:
    """Return the events of a Chrome trace, grouped by kind."""
    found = Timeline()
    for event in trace["traceEvents"]:
        at_s = float(event.get("ts", 0.0)) / 1e6
        track = (event["pid"], event["tid"])
        match event["ph"]:
            case "M" if event["name"] == "thread_name":
                found.names[track] = event["args"]["name"]
            case "M" if event["name"] == "process_name":
                found.groups[track[0]] = event["args"]["name"]
            case "X":
                found.slices.append(
                    Slice(
                        track=track,
                        name=event["name"],
                        start_s=at_s,
                        end_s=at_s + float(event["dur"]) / 1e6,
                        args=event.get("args", {}),
                    )
                )
            case "C":
                found.counters.setdefault(event["name"], []).append((at_s, event["args"]))
            case "i":
                found.marks.append((track, event["name"], at_s))
            case "s" | "t" | "f":
                found.arrows.setdefault(event["id"], []).append((track, at_s))
            case _:
                pass
    return found


def picture(timeline: Timeline, view: View) -> str:
    """Return the picture of `timeline`, drawn as `view` specifies, as SVG."""
    return _Picture(timeline, view).draw()


class _Picture:
    def __init__(self, timeline: Timeline, view: View) -> None:
        self._timeline, self._view = timeline, view
        self._drawing = Drawing(WIDTH)
        ends = [each.end_s for each in timeline.slices]
        self._length_s = max(1e-6, *ends)
        self._rows: dict[tuple[int, int], tuple[float, float]] = {}
        # By track of a slot: the name and the tenant of the request whose phases are being drawn.
        self._residencies: dict[tuple[int, int], tuple[str, str]] = {}
        self._y = 0.0

    def draw(self) -> str:
        drawing, view = self._drawing, self._view
        drawing.text(16, 26, view.title, size=15, is_bold=True)
        self._legend()
        self._plan_rows()
        self._grid()
        self._steps()
        for index, name in enumerate(view.areas):
            self._area(name, self._areas_y + index * (_AREA + 12))
        for each in self._timeline.on(_SLOTS):
            self._slot_slice(each)
        for each in self._timeline.on(_QUEUE):
            self._queue_slice(each)
        self._marks()
        self._arrows()
        return drawing.svg(self._y + 10, view.title)

    def _legend(self) -> None:
        entries = [("prefill", ORANGE), ("waits", AMBER)]
        entries[1:1] = list(self._view.tenants.items()) or [("decode", BLUE)]
        x = _RIGHT
        for name, colour in reversed(entries):
            words = f"decode of {name}" if name in self._view.tenants else name
            x -= len(words) * 6.2 + 26
            self._drawing.rect(x, 16, 11, 11, colour, radius=2)
            self._drawing.text(x + 16, 26, words, size=11, fill=QUIET)

    def _plan_rows(self) -> None:
        """Assign a row to each track and label the rows: steps, counters, slots, queue."""
        drawing, y = self._drawing, 64.0
        self._rows.update((each.track, (y, 20.0)) for each in self._timeline.on(_STEPS))
        drawing.text(16, y + 14, "steps", size=11)
        self._areas_y = y + 34
        y = self._areas_y + len(self._view.areas) * (_AREA + 12)
        slots = sorted({each.track for each in self._timeline.on(_SLOTS)})
        for track in slots:
            self._rows[track] = (y, _SLOT)
            drawing.text(16, y + 13, self._timeline.names.get(track, "slot"), size=11)
            y += _SLOT + 2
        y += 10
        lanes = sorted({each.track for each in self._timeline.on(_QUEUE)})
        for track in self._lanes(lanes):
            self._rows[track] = (y, _LANE)
            y += _LANE + 1
        if lanes:
            top = self._rows[lanes[0]][0]
            drawing.text(16, top + 10, "queue", size=11)
        if len(lanes) > self._view.max_lanes:
            more = f"and {len(lanes) - self._view.max_lanes} lanes more"
            drawing.text(_LEFT, y + 11, more, size=10, fill=QUIET)
            y += 14
        self._y = y

    def _lanes(self, lanes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the lanes of the queue to draw: all lanes with highlighted requests, and the first
        of the others, up to `max_lanes`.
        """
        highlighted = {
            each.track for each in self._timeline.on(_QUEUE) if each.name in self._view.highlighted
        }
        others = [track for track in lanes if track not in highlighted]
        return sorted(highlighted.union(others[: max(0, self._view.max_lanes - len(highlighted))]))

    def _grid(self) -> None:
        for each in ticks(self._length_s, 10):
            x = self._x(each)
            self._drawing.line(x, 54, x, self._y)
            self._drawing.text(x, 48, f"{each:.4g} s", size=11, fill=QUIET, anchor="middle")

    def _steps(self) -> None:
        for each in self._timeline.on(_STEPS):
            y, height = self._rows[each.track]
            x, end = self._span(each)
            colour = ORANGE if "prefill" in each.name else BLUE
            colour = RED if _NO_STEP in each.name else colour
            hint = f"{each.name}: {seconds(each.end_s - each.start_s)}" if end - x > 3 else ""
            # Leave a thin gap between neighbours if the width allows.
            gap = 0.6 if end - x > 2 else 0.0
            self._drawing.rect(x, y, max(end - x - gap, 0.4), height, colour, title=hint)
            if _NO_STEP in each.name:
                self._drawing.text(end, y - 2, each.name, size=10, fill=RED, anchor="end")
            else:
                self._inside(each.name, x, end, y + 14, "#ffffff")

    def _area(self, name: str, y: float) -> None:
        course = self._timeline.counters.get(name, [])
        drawing = self._drawing
        is_pool = name == "KV blocks"
        totals = [sum(values.values()) for _, values in course]
        top = max(totals, default=0.0) or 1.0
        drawing.rect(_LEFT, y, _RIGHT - _LEFT, _AREA, BAND)
        drawing.text(16, y + 14, name, size=11)
        if is_pool:
            drawing.text(16, y + 28, f"{top:.0f} in all", size=10, fill=QUIET)
            self._fill(y, [(at, v["used"] + v["cached"], top) for at, v in course], GREY)
            self._fill(y, [(at, v["used"], top) for at, v in course], VIOLET)
            for index, (words, colour) in enumerate((("used", VIOLET), ("cached", GREY))):
                drawing.text(16 + 32 * index, y + 41, words, size=10, fill=colour)
            return
        drawing.text(16, y + 28, f"up to {top:.0f}", size=10, fill=QUIET)
        colour = AMBER if name == "waiting" else BLUE
        inside = [(at, sum(v.values()), top) for at, v in course if at <= self._length_s]
        self._fill(y, inside, colour)

    def _fill(self, y: float, course: Sequence[tuple[float, float, float]], colour: str) -> None:
        """Fill the area under `course`: (time in seconds, value, value at full height); each value
        applies until the next.
        """
        if not course:
            return
        bottom = y + _AREA
        points: list[str] = []
        last = ""
        for at_s, value, top in course:
            height = bottom - _AREA * value / top
            x = self._x(min(at_s, self._length_s))
            if f"{height:.1f}" != last:
                points.append(f"H{x:.1f}V{height:.1f}")
                last = f"{height:.1f}"
        start, end = self._x(course[0][0]), self._x(min(course[-1][0], self._length_s))
        path = f"M{start:.1f} {bottom:.1f}" + "".join(points) + f"H{end:.1f}V{bottom:.1f}Z"
        self._drawing.path(path, fill=colour)

    def _slot_slice(self, each: Slice) -> None:
        y, height = self._rows[each.track]
        x, end = self._span(each)
        is_phase = "request_id" not in each.args
        if not is_phase:
            self._residencies[each.track] = (each.name, str(each.args.get("tenant", "")))
            hint = f"{each.name}: {seconds(each.end_s - each.start_s)}, {each.args.get('ended')}"
            opacity = self._opacity(each.name)
            self._drawing.rect(x, y, end - x, height, BLUE, opacity=0.25 * opacity, title=hint)
            return
        name, tenant = self._residencies.get(each.track, ("", ""))
        colour = self._view.tenants.get(tenant, BLUE)
        colour = ORANGE if each.name == "prefill" else colour
        opacity = self._opacity(name)
        self._drawing.rect(x, y + 1, end - x, height - 2, colour, opacity=opacity)
        if each.name != "prefill":
            ink = "#ffffff" if opacity == 1.0 else INK
            self._inside(name, x, end, y + 13.5, ink)

    def _queue_slice(self, each: Slice) -> None:
        row = self._rows.get(each.track)
        if row is None:
            return
        x, end = self._span(each)
        hint = f"{each.name} waits {seconds(each.end_s - each.start_s)}"
        opacity = self._opacity(each.name)
        self._drawing.rect(x, row[0], max(end - x, 1), row[1], AMBER, opacity=opacity, title=hint)
        self._inside(each.name, x, end, row[0] + 10, INK, size=9.5)

    def _marks(self) -> None:
        for track, name, at_s in self._timeline.marks:
            row = self._rows.get(track)
            if row is None or at_s > self._length_s:
                continue
            x, middle = self._x(at_s), row[0] + row[1] / 2
            diamond = f"M{x:.1f} {middle - 5:.1f}l4 5l-4 5l-4 -5z"
            self._drawing.path(diamond, fill=RED, stroke="#ffffff")
            if name.isupper():
                self._drawing.text(x + 6, middle + 4, name, size=9, fill=RED)

    def _arrows(self) -> None:
        highlighted = {
            (each.track, round(each.start_s, 6)) for each in self._timeline.slices
            if each.name in self._view.highlighted
        }  # fmt: skip
        for points in self._timeline.arrows.values():
            if not any((track, round(at_s, 6)) in highlighted for track, at_s in points):
                continue
            for (track, at_s), (next_track, next_s) in itertools.pairwise(points):
                rows = self._rows.get(track), self._rows.get(next_track)
                if rows[0] is None or rows[1] is None or next_s > self._length_s:
                    continue
                self._arrow((self._x(at_s), rows[0]), (self._x(next_s), rows[1]))

    def _arrow(
        self, start: tuple[float, tuple[float, float]], end: tuple[float, tuple[float, float]]
    ) -> None:
        (x, row), (to_x, to_row) = start, end
        y, to_y = row[0] + row[1] / 2, to_row[0] + to_row[1] / 2
        bend = max(24.0, abs(to_x - x) / 3)
        curve = f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f}"
        self._drawing.path(f"{curve} {to_x:.1f} {to_y:.1f}", stroke=INK, opacity=0.75)
        self._drawing.path(f"M{to_x:.1f} {to_y:.1f}l-6 -3.5v7z", fill=INK, opacity=0.75)

    def _inside(
        self, words: str, x: float, end: float, y: float, fill: str, *, size: float = 10
    ) -> None:
        """Draw text within a slice, if it fits."""
        if end - x > len(words) * _CHAR + 8:
            self._drawing.text(x + 4, y, words, size=size, fill=fill)

    def _opacity(self, name: str) -> float:
        return 1.0 if not self._view.highlighted or name in self._view.highlighted else _PALE

    def _span(self, each: Slice) -> tuple[float, float]:
        return self._x(each.start_s), self._x(each.end_s)

    def _x(self, at_s: float) -> float:
        return _LEFT + at_s / self._length_s * (_RIGHT - _LEFT)
