"""Traces as a waterfall: a bar for each span, with what it says beside it.

Owns which attributes are shown, and the drawing. Spans are those that a collector received. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from picture_svg import (
    AMBER,
    BAND,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    QUIET,
    RED,
    Drawing,
    seconds,
    ticks,
)

WIDTH = 1180
_NAMES, _BARS, _SAYS = 16.0, 120.0, 690.0
_ROW, _BAR = 22.0, 13.0
_COLOURS = {"prepare": GREY, "queue": AMBER, "prefill": ORANGE, "decode": BLUE, "deliver": GREEN}
_SHOWN = {
    "rpc.response.status_code": "",
    "penstock.error.reason": "error",
    "penstock.tenant": "tenant",
    "gen_ai.latency.time_to_first_token": "first token",
    "penstock.preemptions": "preempted",
    "penstock.replays": "replays",
    "penstock.stalls": "stalls",
    "penstock.stalled_s": "stalled",
    "penstock.queue.reason": "reason",
    "penstock.queue.blocks_s": "blocks",
    "penstock.queue.slots_s": "slots",
    "penstock.queue.token_budget_s": "token budget",
    "penstock.queue.fairness_s": "fairness",
    "penstock.queue.other_s": "other",
    "penstock.queue.position": "position",
    "penstock.queue.passed_by": "passed by",
    "penstock.queue.outcome": "outcome",
    "penstock.prefill.cached_tokens": "cached tokens",
    "penstock.prefill.chunks": "chunks",
    "penstock.decode.tokens": "tokens",
    "penstock.decode.steps": "steps",
}
"""Key and what it is called, in the order of showing; "" for the value alone."""
_SHORT_S = 0.02
"""Of a wait, what is not worth an answer: a step or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSpan:
    """A span as it arrived. Times: nanoseconds since 1970. `is_error`: its status says so."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    is_error: bool = False
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])
    events: tuple[tuple[str, int], ...] = ()

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def request_id(self) -> str:
        """Of a root; empty elsewhere."""
        return str(self.attributes.get("gen_ai.response.id", ""))


def roots_by_request(spans: Sequence[SeenSpan]) -> dict[str, SeenSpan]:
    """The root of each request, by its id."""
    return {span.request_id: span for span in spans if span.request_id}


def family(root: SeenSpan, spans: Sequence[SeenSpan]) -> list[SeenSpan]:
    """A root and its children, by their beginning."""
    children = [span for span in spans if span.parent_id == root.span_id]
    return [root, *sorted(children, key=lambda span: (span.start_ns, span.end_ns))]


def says(span: SeenSpan) -> str:
    """What its attributes tell, in one line; what is nothing is left out."""
    told: list[str] = []
    is_short = span.duration_s < _SHORT_S
    for key, name in _SHOWN.items():
        value = span.attributes.get(key)
        if value in (None, 0, "admitted") or (value == "other" and is_short):
            continue
        if isinstance(value, float) and key.startswith("penstock.queue.") and value < _SHORT_S:
            continue
        text = seconds(value) if isinstance(value, float) else str(value)
        told.append(f"{name} {text}".strip())
    num_in, num_out = (span.attributes.get(f"gen_ai.usage.{e}_tokens") for e in ("input", "output"))
    if num_in is not None:
        told.insert(1, f"{num_in} tokens in, {num_out or 0} out")
    low, high = (span.attributes.get(f"penstock.batch.{each}_size") for each in ("min", "max"))
    if low is not None:
        told.append(f"batch of {low}" if low == high else f"batch of {low} to {high}")
    return " · ".join(told)


def waterfall(spans: Sequence[SeenSpan], request_ids: Sequence[str], title: str) -> str:
    """The traces of these requests, one below the other on one axis. Raises KeyError for none."""
    roots = roots_by_request(spans)
    families = [family(roots[each], spans) for each in request_ids]
    drawing = _Waterfall([span for members in families for span in members])
    drawing.head(title)
    for members in families:
        drawing.trace(members)
    return drawing.svg(title)


class _Waterfall:
    def __init__(self, spans: Sequence[SeenSpan]) -> None:
        self._drawing = Drawing(WIDTH)
        self._start_ns = min(span.start_ns for span in spans)
        self._length_s = max((max(s.end_ns for s in spans) - self._start_ns) / 1e9, 1e-6)
        self._y = 0.0
        self._axis: list[float] = []

    def head(self, title: str) -> None:
        drawing = self._drawing
        drawing.text(_NAMES, 26, title, size=15, is_bold=True)
        self._axis = ticks(self._length_s, 8)
        for each in self._axis:
            x = self._x(self._start_ns + round(each * 1e9))
            drawing.text(x, 50, f"{each:g} s", size=11, fill=QUIET, anchor="middle")
        self._y = 60.0

    def trace(self, members: Sequence[SeenSpan]) -> None:
        root = members[0]
        drawing = self._drawing
        height = _ROW * (len(members) + 1) + 6
        drawing.rect(8, self._y, WIDTH - 16, height, BAND, radius=5)
        for each in self._axis:
            x = self._x(self._start_ns + round(each * 1e9))
            drawing.line(x, self._y + _ROW, x, self._y + height)
        drawing.text(_NAMES, self._y + 16, root.request_id, size=13, is_bold=True)
        name = f"{root.name}   {seconds(root.duration_s)}   trace {root.trace_id}"
        drawing.text(_BARS, self._y + 16, name, size=11, fill=QUIET)
        self._y += _ROW
        for span in members:
            self._span(span, is_root=span is root)
        self._y += 14.0

    def _span(self, span: SeenSpan, *, is_root: bool) -> None:
        drawing, y = self._drawing, self._y
        x, end = self._x(span.start_ns), self._x(span.end_ns)
        colour = (RED if span.is_error else INK) if is_root else _COLOURS.get(span.name, GREY)
        label = "root" if is_root else span.name
        drawing.text(_NAMES + (0 if is_root else 12), y + 15, label, size=12)
        hint = f"{span.name}: {seconds(span.duration_s)}"
        height = _BAR - 6 if is_root else _BAR
        top = y + (_ROW - height) / 2
        drawing.rect(x, top, max(end - x, 1.5), height, colour, title=hint, radius=2)
        if not is_root:
            # After the bar, and before it where that would run into what it says.
            is_late = end > _SAYS - 70
            at, anchor = (x - 5, "end") if is_late else (end + 5, "start")
            is_inside = is_late and x - _BARS < 60
            at, anchor = (x + 6, "start") if is_inside else (at, anchor)
            ink = "#ffffff" if is_inside and span.name == "decode" else INK
            drawing.text(at, y + 15, seconds(span.duration_s), size=11, anchor=anchor, fill=ink)
        for name, at_ns in span.events:
            at = self._x(at_ns)
            drawing.path(f"M{at:.1f} {y + 3:.1f}l5 8l-5 8l-5 -8z", fill=RED)
            drawing.text(at + 7, y + 22, name, size=9.5, fill=RED)
        drawing.text(_SAYS, y + 15, says(span), size=11, fill=INK)
        self._y += _ROW

    def svg(self, title: str) -> str:
        return self._drawing.svg(self._y + 2, title)

    def _x(self, at_ns: int) -> float:
        share = (at_ns - self._start_ns) / 1e9 / self._length_s
        return _BARS + share * (_SAYS - 30 - _BARS)
