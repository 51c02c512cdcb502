"""A flight record is converted to a Chrome trace file for Perfetto, with tracks, counters and
flow events. It includes requests that have not ended.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from penstock.scheduler.events import Preempted
from penstock.scheduler.executor import ExecutorDied
from penstock.server.observe.flight.histories import histories_of
from penstock.server.observe.flight.layout import EVENT, STEP, EventKind
from penstock.server.observe.flight.reader import FlightReader, Recording
from penstock.server.observe.flight.timeline import (
    ENGINE,
    QUEUE,
    SLOTS,
    TimelineLanes,
    timeline_json,
)
from penstock.tools.timeline.summary import step_seconds, summary_lines
from support.flights import RecordedEngine, parsed, play
from support.reports import make_facts
from support.trace_invariants import check_trace

STEPS = 1_000_001
"""The number of the steps' track in a trace file."""


def of_track(document: dict[str, Any], pid: int, phase: str = "X") -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["pid"] == pid and e["ph"] == phase]


@pytest.mark.parametrize(
    ("depth", "seed"), [pytest.param(1, 31, marks=pytest.mark.nightly), (2, 33)]
)
@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("num_steps", [64, 4096])
def test_every_trace_is_valid(depth: int, seed: int, is_over: bool, num_steps: int) -> None:
    recorded = play(RecordedEngine(depth=depth, num_steps=num_steps), seed)
    if is_over:
        recorded.finish()
    recording = recorded.recording()

    document = parsed(timeline_json(recording))

    check_trace(document)
    steps = [e for e in of_track(document, ENGINE) if e["tid"] == STEPS]
    assert len(steps) >= len(recording.steps)
    check_trace(parsed(timeline_json(recording, num_steps=10)))
    check_trace(parsed(timeline_json(FlightReader(_copied(recorded)).recording())))


def _copied(recorded: RecordedEngine) -> bytes:
    return FlightReader(recorded.fd).copy(recorded.clock() + 5.0)


def test_a_request_is_drawn_where_it_was() -> None:
    recorded = RecordedEngine()
    trace_id = bytes(range(16))
    recorded.submit(1, 40, 4, trace_id=trace_id, tenant="acme")
    recorded.finish()

    document = parsed(timeline_json(recorded.recording()))

    (wait,) = of_track(document, QUEUE)
    interval, prefill, decode = of_track(document, SLOTS)
    assert [e["name"] for e in (wait, interval, prefill, decode)] == [
        "request-1",
        "request-1",
        "prefill",
        "decode",
    ]
    for event in (wait, interval):
        assert event["args"]["trace_id"] == trace_id.hex()
        assert event["args"]["tenant"] == "acme"
        assert event["args"]["request_id"] == "request-1"
    assert interval["args"]["ended"] == "LENGTH"
    assert interval["args"]["output_tokens"] == 4
    assert prefill["args"] == {"tokens": 40, "step": 0}
    # The arrow: queue, slot, the step that ended it.
    arrow = [e for e in document["traceEvents"] if e["ph"] in "stf"]
    assert [(e["ph"], e["pid"]) for e in arrow] == [("s", QUEUE), ("t", SLOTS), ("f", ENGINE)]
    last = [e for e in of_track(document, ENGINE) if e["tid"] == STEPS][-1]
    assert last["ts"] <= arrow[-1]["ts"] < last["ts"] + last["dur"]
    assert decode["ts"] + decode["dur"] == pytest.approx(last["ts"] + last["dur"])
    assert last["args"]["finished"] == 1
    counters = of_track(document, ENGINE, "C")
    assert {e["name"] for e in counters} == {"KV blocks", "running", "waiting", "tokens per step"}
    assert all(sum(e["args"].values()) == 60 for e in counters if e["name"] == "KV blocks")


def test_a_running_request_is_open_to_the_end_of_the_recording() -> None:
    recorded = RecordedEngine()
    recorded.submit(1, 40, 400)
    recorded.submit(2, 500, 200)
    recorded.submit(3, 500, 200)
    for _ in range(5):
        recorded.step()
    recording = FlightReader(_copied(recorded)).recording()

    document = parsed(timeline_json(recording))

    check_trace(document)
    end_us = (recording.copied_s - float(recording.events["at_s"].min())) * 1e6
    slot_intervals = [e for e in of_track(document, SLOTS) if e["name"].startswith("request")]
    (waiting,) = [e for e in of_track(document, QUEUE) if e["name"] == "request-3"]
    for event in (*slot_intervals, waiting):
        assert event["ts"] + event["dur"] == pytest.approx(end_us)
    assert {e["args"]["ended"] for e in slot_intervals} == {"still running"}
    lines = "\n".join(summary_lines(recording))
    assert "3 live at the end" in lines
    assert "request-3, still waiting" in lines


def test_preemptions_and_failures_are_marked() -> None:
    recorded = play(RecordedEngine(num_steps=4096), 35)
    recorded.finish()
    document = parsed(timeline_json(recorded.recording()))

    marks = of_track(document, SLOTS, "i") + of_track(document, QUEUE, "i")

    names = [e["name"] for e in marks]
    assert names.count("preempted") == len(recorded.changes(Preempted)) > 0
    assert "EXCEEDS_KV_CACHE" in names
    again = [e for e in of_track(document, QUEUE) if e["args"].get("again")]
    assert len(again) == names.count("preempted")


def test_a_step_that_never_ended_is_drawn_with_its_requests() -> None:
    recorded = dying()
    recording = FlightReader(_copied(recorded)).recording()

    document = parsed(timeline_json(recording))

    check_trace(document)
    last = [e for e in of_track(document, ENGINE) if e["tid"] == STEPS][-1]
    assert "never returned" in last["name"]
    assert last["args"]["prefill_tokens"] == 70
    poisoned = [e for e in of_track(document, SLOTS) if e["name"] == "request-9"]
    assert len(poisoned) == 1
    assert "in flight" in "\n".join(summary_lines(recording))


def dying() -> RecordedEngine:
    """Return a recorded engine that died in its fourth step. A second request was submitted before
    that step.
    """
    recorded = RecordedEngine()
    recorded.submit(1, 40, 50)
    for _ in range(3):
        recorded.step()
    recorded.submit(9, 70, 5)

    def dead() -> None:
        raise ExecutorDied("a driver fault")

    executor: Any = recorded.engine.executor
    executor.collect = dead
    with pytest.raises(ExecutorDied):
        recorded.step()
    return recorded


def test_a_residency_that_began_before_the_recording_is_drawn_from_its_start() -> None:
    events = np.zeros(2, dtype=EVENT)
    events[0] = (12.0, 5, 1, 3, 0, EventKind.PREEMPTED, 0)
    events[1] = (14.0, 9, 2, 4, 17, EventKind.FINISHED, 2)
    steps = np.zeros(1, dtype=STEP)
    steps["begun_s"], steps["collected_s"], steps["updated_s"] = 10.0, 14.0, 14.0
    recording = Recording(
        facts=make_facts(),
        totals={},
        steps=steps,
        events=events,
        requests=np.zeros(0, dtype=np.dtype([("key", "<i8")])),
        last_launch=None,
        copied_s=0.0,
    )

    first, second = histories_of(recording)

    assert first.name == "request 1"
    assert [(s.slot, s.start_s, s.end_s, s.is_cut) for s in first.slot_intervals] == [
        (3, 10.0, 12.0, True)
    ]
    assert [w.start_s for w in first.waits] == [12.0]
    assert [(s.slot, s.start_s, s.end_s) for s in second.slot_intervals] == [(4, 10.0, 14.0)]
    assert second.num_output_tokens == 17
    check_trace(parsed(timeline_json(recording)))
    empty = dataclasses.replace(recording, steps=steps[:0], events=events[:0])
    check_trace(parsed(timeline_json(empty)))
    assert summary_lines(empty)[-1] == "steps        none"


def test_steps_in_flight_at_once_share_the_device() -> None:
    steps = np.zeros(3, dtype=STEP)
    steps["begun_s"] = [0.0, 1.0, 5.0]
    steps["collected_s"] = [3.0, 5.0, 6.5]
    assert step_seconds(steps).tolist() == [3.0, 2.0, 1.5]


def test_as_many_lanes_as_are_open_at_once() -> None:
    lanes = TimelineLanes()
    spans = [(0.0, 5.0), (1.0, 2.0), (1.5, 9.0), (3.0, 4.0), (5.5, 6.0), (6.5, 7.0)]
    taken = [lanes.assign(*span) for span in spans]
    assert taken == [0, 1, 2, 1, 1, 0]
    assert lanes.num == 3


def test_the_summary_shows_what_delayed_which_request() -> None:
    recorded = play(RecordedEngine(num_steps=4096), 36)
    recorded.finish()

    lines = summary_lines(recorded.recording())

    text = "\n".join(lines)
    assert "demo on simulated, engine 1" in text
    assert f"{len(recorded.notes):,} (0 to" in text
    assert f"{sum(recorded.num_output.values()):,} out" in text
    assert "BLOCKS" in text
    assert "off by" in text
    assert f"{len(recorded.changes(Preempted))} preemptions" in text
    last = summary_lines(recorded.recording(), num_steps=5)
    assert any(line.startswith("steps        5 (") for line in last)
