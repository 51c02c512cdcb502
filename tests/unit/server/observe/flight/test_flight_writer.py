"""The flight recorder writes counts, times and tenants of the engine's steps and requests, but no
content of requests.
"""

import dataclasses
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.server.observe.flight.layout import (
    EVENT,
    REQUEST,
    STEP,
    EventKind,
    FlightError,
    facts_of,
    row_struct,
)
from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.listeners import EngineListeners
from penstock.server.observe.recording.recorder import Recorder
from penstock.server.tenants import engine_request_id
from support.core import FakeClock, make_spec
from support.flights import RecordedEngine, make_executor, play
from support.reports import make_facts
from support.self_paced import make_self_paced

GAMES = [
    (1, 11), (2, 13),
    *(pytest.param(*game, marks=pytest.mark.nightly) for game in ((1, 12), (2, 14))),
]  # fmt: skip


@pytest.mark.parametrize("row", [STEP, EVENT, REQUEST])
def test_a_packed_row_is_a_row_of_the_array(row: np.dtype[np.void]) -> None:
    packer = row_struct(row)

    assert packer.size == row.itemsize
    names = row.names or ()
    numbers = [b"ab" if row[n].kind == "S" or row[n].shape else i for i, n in enumerate(names)]
    read = np.frombuffer(packer.pack(*numbers), dtype=row)[0]
    for name, number in zip(names, numbers, strict=True):
        reported = bytes(read[name]).rstrip(b"\0") if isinstance(number, bytes) else read[name]
        assert reported == number, name


@pytest.mark.parametrize(("depth", "seed"), GAMES)
def test_every_step_is_written_as_it_was(depth: int, seed: int) -> None:
    recorded = play(RecordedEngine(depth=depth), seed)
    recorded.finish()

    steps = recorded.recording().steps

    assert len(steps) == len(recorded.notes)
    for row, note, measure in zip(steps, recorded.notes, recorded.measures, strict=True):
        assert row["step"] == note.batch.step
        for name in ("begun_s", "launched_s", "collected_s", "updated_s"):
            assert row[name] == getattr(note, name)
        assert row["num_prefill_tokens"] == measure.num_prefill_tokens == note.num_prefill_tokens
        assert row["num_prefill_rows"] == note.batch.num_rows - note.batch.num_decodes
        assert row["num_decodes"] == measure.num_decodes
        assert row["num_context_tokens"] == measure.num_context_tokens
        for name in ("running", "waiting", "waiting_tokens"):
            assert row[f"num_{name}"] == getattr(note, f"num_{name}")
        blocks = [int(row[f"num_{kind}_blocks"]) for kind in ("used", "cached", "free")]
        assert sum(blocks) == 60
        assert row["waits_for"] == (note.waits_for or 0)
    # Prices become known on the way.
    assert math.isnan(steps["predicted_s"][0])
    assert np.isfinite(steps["predicted_s"][-1])


@pytest.mark.parametrize(("depth", "seed"), GAMES)
def test_ends_contain_how_much_each_request_generated(depth: int, seed: int) -> None:
    recorded = play(RecordedEngine(depth=depth, num_steps=4096), seed)
    recorded.finish()
    assert recorded.changes(Preempted), "the game must preempt"

    events = recorded.recording().events
    ends = events[events["kind"] >= EventKind.FINISHED]
    ends = ends[ends["kind"] <= EventKind.FAILED]

    assert len(ends) == len(recorded.ends)
    for row in ends:
        end = recorded.ends[int(row["key"])]
        assert row["count"] == recorded.num_output[end.key], end
        assert row["reason"] == end.reason
        assert row["kind"] == (EventKind.FAILED if isinstance(end, Failed) else EventKind.FINISHED)
        assert row["at_s"] == end.at_s
    kinds = {(int(row["kind"]), int(row["reason"])) for row in ends}
    assert (EventKind.FINISHED, FinishReason.CANCELLED) in kinds
    assert (EventKind.FAILED, FailureReason.EXCEEDS_KV_CACHE) in kinds


@pytest.mark.parametrize(("depth", "seed"), GAMES)
def test_totals_and_rows_count_the_same(depth: int, seed: int) -> None:
    recorded = play(RecordedEngine(depth=depth), seed)
    recorded.finish()

    recording = recorded.recording()

    totals, steps = recording.totals, recording.steps
    assert totals["num_output_tokens"] == sum(recorded.num_output.values())
    assert totals["num_output_tokens"] == steps["num_tokens"].sum()
    assert totals["num_admitted"] == len(recorded.changes(Admitted))
    assert totals["num_preempted"] == len(recorded.changes(Preempted))
    failed = sum(isinstance(end, Failed) for end in recorded.ends.values())
    assert (totals["num_failed"], totals["num_finished"]) == (failed, len(recorded.ends) - failed)
    for name in ("admitted", "preempted"):
        assert steps[f"num_{name}"].sum() == totals[f"num_{name}"]
    assert totals["num_prompt_tokens"] == sum(
        int(row["num_prompt_tokens"])
        for row in recording.requests
        if recorded.num_output[int(row["key"])]
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_gaps_are_those_between_tokens_of_rows_that_decode(depth: int) -> None:
    """Every gap between two tokens of a request is counted once, unless a preemption lies between
    them.
    """
    recorded = play(RecordedEngine(depth=depth), 21)
    recorded.finish()
    assert recorded.changes(Preempted)

    steps = recorded.recording().steps

    last_s: dict[int, float] = {}
    at_of = {note.updated_s: note.collected_s for note in recorded.notes}
    gaps: dict[float, list[float]] = {at_s: [] for at_s in at_of.values()}
    for events in recorded.reported:
        for change in events.changes:
            if isinstance(change, Preempted):
                last_s.pop(change.key, None)
        for key in events.keys.tolist():
            now = at_of[events.at_s]
            if key in last_s:
                gaps[now].append(now - last_s[key])
            last_s[key] = now
    # A step with decodes that were paused before has the mean of all its gaps.
    of_step = [gaps[at_s] for at_s in steps["collected_s"].tolist()]
    assert steps["num_itl"].tolist() == [len(own) for own in of_step]
    has_some = steps["num_itl"] > 0
    means = [sum(own) / len(own) for own in of_step if own]
    np.testing.assert_allclose(steps["itl_s"][has_some], means, rtol=1e-6)
    assert steps["num_itl"].sum() > 500
    assert any(max(own) > 1.5 * min(own) for own in of_step if own)
    assert np.isnan(steps["itl_s"][steps["num_itl"] == 0]).all()


@pytest.mark.parametrize(("depth", "seed"), GAMES)
def test_events_show_each_residency_with_its_slot(depth: int, seed: int) -> None:
    recorded = play(RecordedEngine(depth=depth, num_steps=4096), seed)
    recorded.finish()

    recording = recorded.recording()

    prompts = {int(row["key"]): int(row["num_prompt_tokens"]) for row in recording.requests}
    # The owner of each slot. A new owner's chunk is written before the release is reported.
    computed: dict[int, int] = dict.fromkeys(prompts, 0)
    slot_of: dict[int, int] = {}
    for row in np.sort(recording.events, order="at_s", kind="stable"):
        key, kind, slot = int(row["key"]), row["kind"], int(row["slot"])
        if kind == EventKind.CHUNK:
            assert 0 <= slot < 8
            computed[key] += int(row["count"])
            slot_of[key] = slot
        elif kind == EventKind.ADMITTED:
            assert slot >= 0
        elif kind in (EventKind.FIRST_TOKEN, EventKind.PREEMPTED):
            assert slot == slot_of[key] or kind == EventKind.PREEMPTED
    for key, num_output in recorded.num_output.items():
        assert num_output == 0 or computed[key] >= prompts[key] - 16 * 20
    total = sum(computed.values())
    assert total == recording.steps["num_prefill_tokens"].sum()
    queued = recording.events[recording.events["kind"] == EventKind.QUEUED]
    # Every output is queued once, except those of requests that were rejected on arrival.
    assert len(np.unique(queued["key"])) == len(queued)
    never = {key for key, end in recorded.ends.items() if isinstance(end, Failed)}
    assert {int(key) for key in queued["key"]} >= set(prompts) - never


def test_a_cached_prefix_is_counted_at_the_first_token() -> None:
    recorded = RecordedEngine()
    for key in (1, 2):
        recorded.engine.submit((make_spec(key, range(48), max_tokens=2, block_size=16),))
        recorded.finish()

    recording = recorded.recording()

    admitted = recording.events[recording.events["kind"] == EventKind.ADMITTED]
    assert admitted["count"].tolist() == [0, 32]
    assert recording.totals["num_cached_tokens"] == 32
    assert recording.totals["num_prompt_tokens"] == 96


def test_no_content_of_a_request_is_in_it() -> None:
    recorded = RecordedEngine()
    secret = 0x5EC2E75E
    ids = np.full(40, secret & 0x7FFF, np.int32)
    recorded.engine.submit(
        (
            RequestSpec(
                key=1,
                request_id="r",
                prompt_ids=ids,
                max_tokens=4,
                session_id="canary-session",
                block_hashes=(b"canary-hash-0000", b"canary-hash-0001"),
                hash_salt=b"canary-salt",
            ),
        )
    )
    recorded.finish()
    tokens = np.concatenate([events.tokens for events in recorded.reported])

    reader = FlightReader(recorded.fd)
    data = reader.copy(1.0)

    assert b"canary" not in data
    assert ids[:2].tobytes() not in data
    assert tokens.tobytes() not in data


def test_values_beyond_the_range_of_a_field_are_clipped() -> None:
    writer = FlightWriter(fd := create_memory(64, "t"), make_facts())
    writer.note_submit(
        (
            RequestSpec(
                key=2**63 - 1,
                request_id="ü" * 200,
                prompt_ids=np.zeros(1, np.int32),
                max_tokens=2**40,
                priority=-(2**50),
                tenant="t" * 100,
                output_index=10**6,
            ),
        )
    )

    row = FlightReader(fd).recording().requests[0]

    assert row["max_tokens"] == 2**32 - 1
    assert row["priority"] == -(2**31) + 1
    assert row["output_index"] == 2**16 - 1
    assert bytes(row["request_id"]) == ("ü" * 32).encode()


def test_attributes_that_exceed_the_header_are_rejected() -> None:
    with pytest.raises(FlightError, match="facts"):
        FlightWriter(create_memory(64, "t"), make_facts(executor="x" * 5000))


def test_a_self_paced_engine_is_recorded() -> None:
    clock = FakeClock()
    clock.now_s = 10.0
    engine, executor = make_self_paced(clock=clock)
    fd = create_memory(64, "t")
    facts = facts_of("m", 1, executor.info, SchedulerConfig())
    writer = FlightWriter(fd, facts)
    config = SchedulerConfig(max_num_batched_tokens=16)
    flight = Engine(executor, config, clock, listener=EngineListeners(writer))
    flight.submit((make_spec(1, 6, max_tokens=5),))
    flight.submit((make_spec(2, 5, max_tokens=3),))
    flight.step()
    for at_s, counts in ((11.0, {1: 1}), (12.0, {1: 2, 2: 1}), (15.0, {2: 1}), (15.5, {1: 1})):
        clock.now_s = at_s
        for key, count in counts.items():
            executor.emit(key, count)
        if at_s == 11.0:
            executor.find_prefix(1, 4)
        flight.step()
    clock.now_s = 16.0
    executor.emit(1)
    executor.emit(2)
    flight.step()

    recording = FlightReader(fd).recording()
    events = recording.events
    kinds = {
        key: [EventKind(int(row["kind"])).name for row in events if row["key"] == key]
        for key in (1, 2)
    }
    # A chunk is written at the launch, before the events of the turn.
    assert kinds[2] == ["CHUNK", "QUEUED", "ADMITTED", "FIRST_TOKEN", "FINISHED"]
    assert kinds[1].count("CHUNK") == 1
    assert kinds[1].count("PREFIX_FOUND") == 1
    ends = recording.events[recording.events["kind"] == EventKind.FINISHED]
    assert dict(zip(ends["key"].tolist(), ends["count"].tolist(), strict=True)) == {1: 5, 2: 3}
    assert recording.totals["num_output_tokens"] == 8
    assert recording.totals["num_prompt_tokens"] == 11
    assert recording.totals["num_cached_tokens"] == 4
    assert recording.steps["num_prefill_tokens"].sum() == 11
    reported = recording.steps[recording.steps["num_itl"] > 0]
    # 1: tokens at 11, 12 (two), 15.5; 2: at 12 and 15; not those of the turn that ends them.
    assert reported["itl_s"].tolist() == [1.0, 3.0, 3.5]
    assert reported["num_itl"].tolist() == [1, 1, 1]
    engine.close()


def test_the_flight_writer_works_together_with_a_recorder(tmp_path: Path) -> None:
    clock = VirtualClock(5.0)
    executor = make_executor(clock)
    fd = create_memory(64, "t")
    config = SchedulerConfig()
    writer = FlightWriter(fd, facts_of("m", 1, executor.info, config))
    recorder = Recorder(tmp_path, block_size=16)
    engine = Engine(executor, config, clock, EngineListeners(writer, recorder))
    engine.submit((make_spec(1, 20, max_tokens=3, block_size=16, arrival_s=5.0),))
    while engine.has_work:
        engine.step()
    recorder.close()

    assert len(FlightReader(fd).recording().steps) == 3
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3
    assert engine.output_views() == ()


def test_an_error_of_the_flight_recorder_ends_only_the_recording(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = RecordedEngine()
    recorded.submit(1, 20, 5)
    recorded.step()

    def broken(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(recorded.writer, "note_iteration", broken)
    monkeypatch.setattr(recorded.writer, "note_launch", broken)
    with caplog.at_level(logging.ERROR):
        recorded.finish()

    assert isinstance(recorded.ends[1], Completed)
    assert recorded.num_output[1] == 5
    # Stated once, not for each step.
    assert len(caplog.records) == 1


ID = "x" * 64  # as much as a row holds


def test_a_tenants_request_has_the_id_that_the_tenant_gave_it() -> None:
    recorded = RecordedEngine()
    spec = make_spec(1, arrival_s=recorded.clock(), tenant="acme")
    recorded.engine.submit((dataclasses.replace(spec, request_id=engine_request_id("acme", ID)),))

    (row,) = recorded.recording().requests

    assert (bytes(row["request_id"]), bytes(row["tenant"])) == (ID.encode(), b"acme")
