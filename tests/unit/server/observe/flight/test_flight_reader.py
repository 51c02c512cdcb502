"""A reader gets complete rows in order while the writer writes and after the writer has died."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.observe.flight.layout import (
    FACTS_OFFSET,
    FACTS_SIZE_OFFSET,
    FIRST_OFFSET,
    GENERATION_OFFSET,
    HEADER_BYTES,
    STEP,
    TOTALS_OFFSET,
    FlightError,
    encode_facts,
)
from penstock.server.observe.flight.memory import EVENT_RING, STEP_RING, RingMemory, create_memory
from penstock.server.observe.flight.reader import FlightReader, dump
from penstock.server.observe.flight.writer import FlightWriter
from support.flights import RecordedEngine, play
from support.reports import make_facts


@pytest.fixture
def fd() -> Iterator[int]:
    number = create_memory(64, "test")
    yield number
    os.close(number)


def append(memory: RingMemory, number: int, num: int = 1) -> None:
    """Append `num` steps, whose numbers start at `number`. In each row, the first 19 fields are the
    step's number, and the other five are 0.
    """
    for step in range(number, number + num):
        memory.appender(STEP_RING)(*([step] * 19), 0, 0, 0, 0, 0)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_rows_appended_in_batches_equal_rows_appended_singly(batches: list[int]) -> None:
    """Some batches cross the end of the ring, which holds 64 steps, or have more rows than are
    packed at once.
    """
    together, apart = create_memory(64, "test"), create_memory(64, "test")
    try:
        one, other = RingMemory(together, make_facts()), RingMemory(apart, make_facts())
        add = one.batch_appender(STEP_RING)
        step = 0
        for num in batches:
            rows = [[at] * 19 + [0] * 5 for at in range(step, step + num)]
            add([value for row in rows for value in row])
            append(other, step, num)
            step += num
        assert one.totals.tolist() == other.totals.tolist()
        start = HEADER_BYTES
        size = os.fstat(together).st_size - start
        assert os.pread(together, size, start) == os.pread(apart, size, start)
        one.close()
        other.close()
    finally:
        os.close(together)
        os.close(apart)


def test_before_the_first_write_a_reader_finds_no_rows(fd: int) -> None:
    reader = FlightReader(fd)

    assert reader.facts is None
    assert reader.new_steps()[1] == 0
    assert len(reader.new_steps()[0]) == 0
    with pytest.raises(FlightError, match="no engine"):
        reader.recording()
    with pytest.raises(FlightError, match="no engine"):
        reader.copy(1.0)
    reader.close()
    reader.close()


def test_steps_are_reported_once_in_order_and_what_was_lost_is_counted(fd: int) -> None:
    memory = RingMemory(fd, make_facts())
    reader = FlightReader(fd)
    append(memory, 0, 5)
    rows, num_missed = reader.new_steps()
    assert (rows["step"].tolist(), num_missed) == ([0, 1, 2, 3, 4], 0)
    assert reader.new_steps()[0].tolist() == []

    append(memory, 5, 200)
    rows, num_missed = reader.new_steps()

    # One row fewer than the ring has: the writer may be overwriting the oldest.
    assert rows["step"].tolist() == list(range(142, 205))
    assert num_missed == 137
    assert reader.totals["num_steps"] == 205
    assert rows["num_free_blocks"].tolist() == rows["step"].tolist()


def test_rows_that_change_while_they_are_read_are_dropped(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RingMemory(fd, make_facts())
    append(memory, 0, 64)
    reader = FlightReader(fd)
    arange = np.arange

    def slow(*bounds: int) -> object:
        # Between the count and the copy, ten more are written.
        append(memory, 64, 10)
        return arange(*bounds)

    monkeypatch.setattr("penstock.server.observe.flight.reader.np.arange", slow)
    rows, num_missed = reader.new_steps()
    monkeypatch.undo()

    assert rows["step"].tolist() == list(range(11, 64))
    assert num_missed == 11
    assert reader.new_steps()[0]["step"].tolist() == list(range(64, 74))


def test_an_engine_that_starts_over_is_followed(fd: int) -> None:
    memory = RingMemory(fd, make_facts(epoch=1))
    reader = FlightReader(fd)
    append(memory, 0, 5)
    assert len(reader.new_steps()[0]) == 5

    memory = RingMemory(fd, make_facts(epoch=2))
    append(memory, 0, 3)

    # Still the rows of the reported steps.
    assert reader.facts == make_facts(epoch=1)
    rows, num_missed = reader.new_steps()
    assert (len(rows), num_missed) == (3, 0)
    assert reader.facts == make_facts(epoch=2)
    assert reader.recording().events.tolist() == []


def test_a_recording_whose_start_was_interrupted_is_ignored_and_the_next_is_read(fd: int) -> None:
    RingMemory(fd, make_facts(epoch=1))
    os.pwrite(fd, (3).to_bytes(8, "little"), GENERATION_OFFSET)
    reader = FlightReader(fd)
    assert len(reader.new_steps()[0]) == 0
    with pytest.raises(FlightError, match="just started"):
        reader.recording()

    RingMemory(fd, make_facts(epoch=2))

    assert reader.facts == make_facts(epoch=2)


def test_a_copy_contains_only_what_was_complete_in_it(fd: int) -> None:
    memory = RingMemory(fd, make_facts())
    append(memory, 0, 100)
    memory.append(EVENT_RING, 1.0, 0, 1, 0, 0, 1, 0)
    data = FlightReader(fd).copy(77.0)

    recording = FlightReader(data).recording()

    assert recording.copied_s == 77.0
    assert recording.steps["step"].tolist() == list(range(37, 100))
    assert len(recording.events) == 1
    assert recording.totals["num_steps"] == 100
    # Copies of copies are the same.
    again = FlightReader(FlightReader(data).copy(78.0)).recording()
    assert again.steps["step"].tolist() == recording.steps["step"].tolist()


_WRITER = """
import sys
from penstock.server.observe.flight.memory import STEP_RING, RingMemory
from penstock.server.observe.flight.layout import decode_facts
memory = RingMemory(int(sys.argv[1]), decode_facts(sys.stdin.buffer.read()))
for step in range(1, 2**31):
    memory.appender(STEP_RING)(*([step] * 19), 0, 0, 0, 0, 0)
"""


def test_a_writer_in_another_process_is_read_while_it_runs_and_after_it_was_killed(
    fd: int, tmp_path: Path
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE
    )
    assert writer.stdin is not None
    writer.stdin.write(encode_facts(make_facts()))
    writer.stdin.close()
    reader = FlightReader(fd)
    num_seen = num_lost = 0
    copies: list[bytes] = []
    try:
        while num_seen + num_lost < 100_000:
            assert writer.poll() is None
            rows, num_missed = reader.new_steps()
            num_lost += num_missed
            for name in ("begun_s", "num_itl", "num_free_blocks", "num_running"):
                assert (rows[name] == rows["step"]).all()
            first = num_seen + num_lost + 1
            assert rows["step"].tolist() == list(range(first, first + len(rows)))
            num_seen += len(rows)
            if len(rows) and len(copies) < 20:
                copies.append(reader.copy(1.0))
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
    assert num_seen

    for data in copies:
        steps = FlightReader(data).recording().steps
        assert (steps["begun_s"] == steps["step"]).all()
        assert (steps["num_free_blocks"] == steps["step"]).all()
    left = FlightReader(dump(fd, tmp_path, "killed")).recording()
    assert left.steps["step"].tolist()[-1] == left.totals["num_steps"]
    assert len(left.steps) == 63


def test_data_that_is_no_recording_is_rejected(tmp_path: Path) -> None:
    data = _copy()
    cases = {
        b"": "is not a flight record",
        b"x" * 10_000: "is not a flight record",
        data[:-1]: "truncated",
        data + b"x": "truncated",
        data[:16] + b"\x09" + data[17:]: "layout 9",
        data[:24] + b"\x03" + data[25:]: "power of two",
    }
    for broken, reason in cases.items():
        path = tmp_path / "broken.bin"
        path.write_bytes(broken)
        for source in (broken, path):
            with pytest.raises(FlightError, match=reason):
                FlightReader(source)
    for facts in (b"[", b'{"x":' + b"[" * 2000):
        changed = bytearray(data)
        changed[FACTS_OFFSET : FACTS_OFFSET + len(facts)] = facts
        struct.pack_into("<I", changed, FACTS_SIZE_OFFSET, len(facts))
        with pytest.raises(FlightError, match="facts"):
            FlightReader(bytes(changed)).recording()


def _copy() -> bytes:
    recorded = play(RecordedEngine(num_steps=64), 1, 5)
    recorded.finish()
    return FlightReader(recorded.fd).copy(1.0)


_DATA = _copy()


@settings(max_examples=60, deadline=None)
@given(
    offset=st.integers(GENERATION_OFFSET, HEADER_BYTES - 9),
    value=st.integers(0, 2**64 - 1),
)
def test_a_damaged_header_gives_an_error_or_rows_but_nothing_else(offset: int, value: int) -> None:
    data = bytearray(_DATA)
    data[offset : offset + 8] = value.to_bytes(8, "little")
    try:
        recording = FlightReader(bytes(data)).recording()
    except FlightError:
        return
    assert len(recording.steps) <= 64
    assert recording.steps.dtype == STEP


@pytest.mark.parametrize("offset", [TOTALS_OFFSET, FIRST_OFFSET])
def test_impossibly_large_counts_are_rejected(offset: int) -> None:
    data = bytearray(_DATA)
    data[offset : offset + 8] = (2**64 - 1).to_bytes(8, "little")
    with pytest.raises(FlightError, match="counts"):
        FlightReader(bytes(data)).recording()


def test_a_writer_can_be_closed_twice_and_its_memory_still_read(fd: int) -> None:
    writer = FlightWriter(fd, make_facts())
    writer.close()
    writer.close()
    assert FlightReader(fd).facts == make_facts()


@pytest.mark.parametrize("num_steps", [0, 63, 100, 1 << 25])
def test_a_memory_of_an_invalid_size_is_rejected(num_steps: int) -> None:
    with pytest.raises(FlightError, match="power of two"):
        create_memory(num_steps, "test")
