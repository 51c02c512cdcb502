"""Checks that a trace obeys the rules of the Chrome trace event format that viewers rely on."""

from collections import defaultdict
from typing import Any

Track = tuple[int, int]


def check_trace(document: dict[str, Any]) -> None:
    events: list[dict[str, Any]] = document["traceEvents"]
    kinds = [event["ph"] for event in events]
    num_meta = kinds.count("M")
    assert set(kinds[:num_meta]) <= {"M"}, "names come first"
    rest = events[num_meta:]
    times = [event["ts"] for event in rest]
    assert times == sorted(times)
    assert not times or times[0] >= 0.0
    _check_names(events[:num_meta], rest)
    slices = _check_nesting(rest)
    _check_flows(rest, slices)
    assert set(kinds[num_meta:]) <= set("XCistf")
    for event in rest:
        check_event(event)


def check_event(event: dict[str, Any]) -> None:
    """Check an event that is not metadata: it has the fields of its phase, and its times are the
    same nanoseconds whether viewers truncate or round.
    """
    assert isinstance(event["name"], str), event
    assert isinstance(event["pid"], int), event
    assert isinstance(event["tid"], int), event
    for name in ("ts", "dur") if event["ph"] == "X" else ("ts",):
        # Viewers convert to nanoseconds, some by truncation and some by rounding.
        assert int(event[name] * 1000) == round(event[name] * 1000), event
    match event["ph"]:
        case "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        case "i":
            assert event["s"] in ("t", "p", "g")
        case "s" | "t" | "f":
            assert isinstance(event["id"], int)
            assert event["cat"], "viewers know a flow by its name, category and id"
            # Without it the arrow would end in the slice after this one.
            assert event.get("bp") == ("e" if event["ph"] == "f" else None)
        case _:
            pass


def _track(event: dict[str, Any]) -> Track:
    return event["pid"], event["tid"]


def _check_names(meta: list[dict[str, Any]], rest: list[dict[str, Any]]) -> None:
    keys = [(event["name"], event["pid"], event["tid"]) for event in meta]
    assert len(keys) == len(set(keys)), "a track is named twice"
    threads = {(pid, tid) for name, pid, tid in keys if name == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads), "viewers know a thread by its number"
    processes = {pid for name, pid, _ in keys if name == "process_name"}
    for event in rest:
        assert event["pid"] in processes
        assert event["ph"] == "C" or _track(event) in threads, event


def _check_nesting(rest: list[dict[str, Any]]) -> dict[Track, list[tuple[int, int]]]:
    """Check that the slices of a track are nested or disjoint; return the start and end of each,
    nanoseconds, by track.
    """
    slices: dict[Track, list[tuple[int, int]]] = defaultdict(list)
    open_until: dict[Track, list[int]] = defaultdict(list)
    for event in rest:
        if event["ph"] != "X":
            continue
        start = int(event["ts"] * 1e3)
        end = start + int(event["dur"] * 1e3)
        assert end > start
        stack = open_until[_track(event)]
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1], f"{event} sticks out of the slice around it"
        stack.append(end)
        slices[_track(event)].append((start, end))
    return slices


def _check_flows(rest: list[dict[str, Any]], slices: dict[Track, list[tuple[int, int]]]) -> None:
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in rest:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for number, points in flows.items():
        phases = "".join(event["ph"] for event in points)
        assert phases[0] == "s", number
        assert phases[-1] == "f", number
        assert set(phases[1:-1]) <= {"t"}, number
        for event in points:
            at = int(event["ts"] * 1e3)
            # Viewers do not draw an arrow whose end is in no slice of its track.
            assert any(start <= at < end for start, end in slices[_track(event)]), event
