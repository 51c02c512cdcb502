"""W3C trace context is parsed strictly and written correctly. Parsing never raises."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.request_record import TraceParent
from penstock.server.observe.trace_context import (
    MAX_TRACE_STATE_CHARS,
    NOT_TRACED,
    RemoteParent,
    TraceIds,
    parse_traceparent,
    trace_metadata,
    trace_response,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("value", [GOOD, GOOD.encode()])
def test_a_valid_header_is_parsed(value: str | bytes) -> None:
    expected = RemoteParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), True, "a=1,b=2")
    assert parse_traceparent(value, "a=1,b=2") == expected


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_only_one_flag_means_sampled(flags: str, is_sampled: bool) -> None:
    parent = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert parent is not None
    assert parent.is_sampled is is_sampled


@pytest.mark.parametrize(
    "value",
    [
        "",
        "canary",
        GOOD[:-1],
        GOOD + "-",
        GOOD + "-extra",
        f" {GOOD}",
        f"{GOOD} ",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00_{TRACE}_{SPAN}_01",
        f"0x-{TRACE}-{SPAN}-01",
        f"00-{'g' * 32}-{SPAN}-01",
        f"00-{TRACE[:-2]}  -{SPAN}-01",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"00-{SPAN}-{TRACE}-01",
        f"01-{TRACE}-{SPAN}-01extra",
        b"\xff" * 55,
    ],
)
def test_a_malformed_header_counts_as_none(value: str | bytes) -> None:
    assert parse_traceparent(value, "a=1") is None


@pytest.mark.parametrize("value", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes"])
def test_a_later_version_is_read_as_far_as_it_is_known(value: str) -> None:
    parent = parse_traceparent(value)
    assert parent is not None
    assert (parent.trace_id.hex(), parent.is_sampled) == (TRACE, True)


@given(st.text() | st.binary(), st.text() | st.binary())
def test_parsing_never_raises(value: str | bytes, state: str | bytes) -> None:
    parse_traceparent(value, state)
    parent = parse_traceparent(GOOD, state)
    assert parent is not None
    assert len(parent.trace_state) <= MAX_TRACE_STATE_CHARS


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=1", "a=1"),
        ("a=\x00", ""),
        ("a=é", ""),
        ("x" * 513, ""),
        ("a=" + "x" * 510, "a=" + "x" * 510),
        ("a=" + "x" * 400 + ",b=" + "y" * 200, "a=" + "x" * 400),
    ],
)
def test_the_tracestate_is_truncated_at_whole_members(state: str, kept: str) -> None:
    parent = parse_traceparent(GOOD, state)
    assert parent is not None
    assert parent.trace_state == kept


def test_a_request_gets_its_own_span() -> None:
    ids = TraceIds()
    parent = parse_traceparent(GOOD, "a=1")
    assert parent is not None
    child, root = ids.new_trace_parent(parent), ids.new_trace_parent(None)
    assert child.trace_id == parent.trace_id
    assert child.parent_span_id == parent.span_id != child.span_id
    assert (child.is_parent_sampled, child.trace_state) == (True, "a=1")
    assert (len(root.trace_id), len(root.span_id)) == (16, 8)
    assert (root.parent_span_id, root.is_parent_sampled) == (b"", None)


def test_ids_are_random_over_their_whole_length() -> None:
    ids = TraceIds()
    drawn = [ids.new_trace_parent(None) for _ in range(10_000)]
    assert len({trace.trace_id for trace in drawn}) == len(drawn)
    assert len({trace.span_id for trace in drawn}) == len(drawn)
    assert len({trace.trace_id[:8] for trace in drawn}) > len(drawn) - 2
    assert len({trace.trace_id[8:] for trace in drawn}) > len(drawn) - 2


def test_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = iter([bytes(4096), bytes(4096), b"\x01" * 4096])
    monkeypatch.setattr(os, "urandom", lambda size: next(pools))
    trace = TraceIds().new_trace_parent(None)
    assert any(trace.trace_id)
    assert any(trace.span_id)


def test_a_forked_process_draws_other_ids() -> None:
    ids = TraceIds()
    ids.new_trace_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, ids.new_trace_id())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16) != ids.new_trace_id()
    os.close(reader)
    os.close(writer)


NUM_PROCESSES, NUM_IDS = 4, 5_000
DRAW = f"""
import sys
from penstock.server.observe.trace_context import TraceIds
ids = TraceIds()
for _ in range({NUM_IDS}):
    trace = ids.new_trace_parent(None)
    sys.stdout.buffer.write(trace.trace_id + trace.span_id)
"""


def test_processes_draw_no_id_twice() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    processes = [
        subprocess.Popen([sys.executable, "-c", DRAW], stdout=subprocess.PIPE, env=environment)
        for _ in range(NUM_PROCESSES)
    ]
    drawn = b"".join(process.communicate(timeout=60)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * NUM_PROCESSES
    traces = [drawn[at : at + 16] for at in range(0, len(drawn), 24)]
    spans = [drawn[at + 16 : at + 24] for at in range(0, len(drawn), 24)]
    assert len(set(traces)) == len(set(spans)) == NUM_PROCESSES * NUM_IDS
    # Samplers that use half of the id need both halves to be random.
    for half in (slice(0, 8), slice(8, 16)):
        assert len({trace[half] for trace in traces}) == NUM_PROCESSES * NUM_IDS
        assert all(any(trace[half]) for trace in traces)
    assert {len(trace) for trace in traces} == {16}


@pytest.mark.parametrize(("is_sampled", "flags"), [(None, "00"), (False, "00"), (True, "01")])
def test_what_a_caller_receives(is_sampled: bool | None, flags: str) -> None:
    trace = TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), b"p" * 8, is_sampled)
    assert trace_response(trace) == f"00-{TRACE}-{SPAN}-{flags}"
    assert trace_metadata(trace) == (
        ("x-trace-id", TRACE),
        ("traceresponse", f"00-{TRACE}-{SPAN}-{flags}"),
    )
    assert trace_metadata(NOT_TRACED) == ()
