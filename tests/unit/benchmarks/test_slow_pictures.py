"""The pictures of docs/why-is-it-slow.md: what is drawn is what was seen."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from penstock.server.observe.flight.timeline import timeline_json
from support.flights import Flown

SVG = "{http://www.w3.org/2000/svg}"


def module(name: str) -> Any:
    return importlib.import_module(name)


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def span(name: str, start_ms: int, end_ms: int, **more: Any) -> Any:
    given = {
        "trace_id": "t1",
        "span_id": name,
        "parent_id": "root",
        "start_ns": start_ms * 1_000_000,
        "end_ns": end_ms * 1_000_000,
    }
    return module("picture_trace").SeenSpan(name=name, **{**given, **more})


def root(**attributes: Any) -> Any:
    told = {"gen_ai.response.id": "<r-1>", **attributes}
    return span("penstock.v1/Generate", 0, 2000, span_id="root", parent_id="", attributes=told)


@pytest.mark.parametrize(
    ("value_s", "told"),
    [(0.0, "0 s"), (4e-5, "40 µs"), (0.0124, "12.4 ms"), (3.214, "3.21 s"), (640.0, "640 s")],
)
def test_durations_are_told_as_people_do(value_s: float, told: str) -> None:
    assert module("picture_svg").seconds(value_s) == told


@pytest.mark.parametrize(("length", "last"), [(4.2, 4.0), (0.9, 0.9), (35.0, 35.0), (0.0, 0.0)])
def test_ticks_are_round_and_within(length: float, last: float) -> None:
    found = module("picture_svg").ticks(length, 10)
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(last)
    assert len(found) <= 11


def test_a_waterfall_has_each_span_where_it_was() -> None:
    queue = {"penstock.queue.reason": "blocks", "penstock.queue.blocks_s": 0.4}
    spans = [
        root(**{"gen_ai.usage.input_tokens": 7, "penstock.preemptions": 1}),
        span("decode", 1000, 2000, attributes={"penstock.decode.tokens": 3}),
        span("queue", 0, 1000, attributes=queue),
        span("queue", 0, 9000, parent_id="another", trace_id="t2"),
    ]
    svg = module("picture_trace").waterfall(spans, ["<r-1>"], "A title")

    told = words(svg)
    assert told.index("queue") < told.index("decode")
    assert told.count("queue") == 1
    for each in ("A title", "<r-1>", "reason blocks · blocks 400 ms", "tokens 3", "1.00 s"):
        assert each in told
    assert "7 tokens in, 0 out" in " ".join(told)
    bars = {
        (box.findtext(f"{SVG}title") or "").partition(":")[0]: float(box.get("width", "0"))
        for box in ET.fromstring(svg).iter(f"{SVG}rect")
    }
    assert bars["queue"] == pytest.approx(bars["decode"], abs=0.2)
    assert bars["penstock.v1/Generate"] == pytest.approx(2 * bars["queue"], abs=0.2)


def test_who_was_not_traced_is_missed() -> None:
    with pytest.raises(KeyError, match="r-2"):
        module("picture_trace").waterfall([root()], ["r-2"], "")


def test_what_a_short_wait_lacked_is_not_told() -> None:
    says = module("picture_trace").says
    waits = {"penstock.queue.reason": "other", "penstock.queue.other_s": 0.005}
    assert says(span("queue", 0, 5, attributes=waits)) == ""
    waits["penstock.queue.other_s"] = 0.5
    assert says(span("queue", 0, 500, attributes=waits)) == "reason other · other 500 ms"


@pytest.fixture
def trace() -> dict[str, Any]:
    flown = Flown(max_num_seqs=2)
    for key in (1, 2, 3):
        flown.submit(key, 20, 6)
    flown.finish()
    loaded: dict[str, Any] = json.loads(b"".join(timeline_json(flown.recording())))
    return loaded


def test_a_timeline_shows_slots_queue_and_steps(trace: dict[str, Any]) -> None:
    drawing = module("picture_timeline")
    timeline = drawing.timeline_of(trace)
    told = words(drawing.picture(timeline, drawing.View(title="Three in two slots")))

    assert {"steps", "slot 0", "slot 1", "queue", "Three in two slots"} <= set(told)
    assert "slot 2" not in told
    assert any("prefill" in each for each in told)
    assert {f"request-{key}" for key in (1, 2, 3)} <= set(told)
    assert len(timeline.on("steps")) == len(timeline.counters["KV blocks"])


def test_only_who_stands_out_has_an_arrow(trace: dict[str, Any]) -> None:
    drawing = module("picture_timeline")
    timeline = drawing.timeline_of(trace)

    def arrows(*told: str) -> int:
        svg = drawing.picture(timeline, drawing.View(title="", told=told, areas=()))
        return sum("C" in path.get("d", "") for path in ET.fromstring(svg).iter(f"{SVG}path"))

    # From the queue to a slot, from there to the step.
    assert arrows() == 0
    assert arrows("request-3") == 2
    assert arrows("request-2", "request-3") == 4


def test_a_part_of_it_has_nothing_of_the_rest(trace: dict[str, Any]) -> None:
    drawing = module("picture_timeline")
    timeline = drawing.timeline_of(trace)
    (begun_s,) = (each.start_s for each in timeline.on("slots") if each.name == "request-3")

    def svg(**part: float) -> str:
        drawn: str = drawing.picture(timeline, drawing.View(title="", areas=(), **part))
        return drawn

    assert "request-3: " in svg()
    assert "request-3: " not in svg(until_s=begun_s)
    assert "request-3 waits " in svg(until_s=begun_s)
    assert "request-3 waits " not in svg(since_s=begun_s + 1e-6)


def test_clients_report_by_group() -> None:
    load = module("slow_load")
    answers = [
        load.Answer(name="a-1", ttft_s=0.1, longest_gap_s=0.2, total_s=1, num_tokens=3, end="OK"),
        load.Answer(name="a-2", ttft_s=0.3, longest_gap_s=None, total_s=3, num_tokens=1, end="X"),
        load.Answer(name="b-1", ttft_s=None, longest_gap_s=None, total_s=9, num_tokens=0, end="X"),
    ]
    assert list(load.figures_of(answers, "a-").values()) == [
        "200 ms; 300 ms",
        "200 ms",
        "2.00 s; 3.00 s",
        "1 OK, 1 X",
    ]
    assert load.figures_of(answers, "b-")["first token, median; worst"] == "-"


@pytest.mark.parametrize(
    ("values", "unit", "told"),
    [
        ({"": 0.25}, "s", "250 ms"),
        ({"blocks": 1.5, "slots": 0.0, "other": 2048.0}, "", "blocks 1.5, other 2,048"),
        ({"": float("nan")}, "s", "-"),
        ({}, "", "0"),
    ],
)
def test_answers_of_prometheus_fit_in_a_cell(
    values: dict[str, float], unit: str, told: str
) -> None:
    assert module("slow_page").answer_of(values, unit) == told


def test_what_was_told_replaces_what_stood_there() -> None:
    page = module("slow_page")
    text = "a\n<!-- run: x -->\nold\n<!-- end of run -->\nb"
    new = page.with_told(text, "x", "new")
    assert new == "a\n<!-- run: x -->\n\nnew\n\n<!-- end of run -->\nb"
    assert page.with_told(new, "x", "new") == new
    with pytest.raises(ValueError, match="run: y"):
        page.with_told(text, "y", "new")


def test_the_log_is_shown_without_folders() -> None:
    log = (
        "engine died before\npenstock metrics on x\nnoise\nengine died: /a/b/penstock-flight-1.bin"
    )
    logged = module("slow_pictures").logged
    assert logged(log, ("engine died",)) == "engine died: penstock-flight-1.bin"
    assert logged(log, ()) == ""
