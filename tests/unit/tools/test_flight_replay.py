"""A flight record is replayed with the same requests and tokens, and nearly the same
throughput.
"""

import os
from pathlib import Path

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.request import FinishReason
from penstock.server.observe.flight.layout import FlightError
from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import dump
from penstock.server.observe.flight.writer import FlightWriter
from penstock.tools.simulation.calibration import fit_cost
from penstock.tools.simulation.flight_trace import flight_steps, flight_trace, is_flight_file
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import summarise
from support.flights import COST, RecordedEngine
from support.reports import make_facts

BOUND = 0.02
"""Largest difference in throughput: costs of one machine are known exactly, arrivals are
recorded.
"""


def flown_traffic(depth: int, num_requests: int = 80) -> RecordedEngine:
    recorded = RecordedEngine(depth=depth, num_steps=2048, num_blocks=120)
    for key in range(1, num_requests + 1):
        recorded.submit(key, 20 + 7 * key % 250, 1 + 13 * key % 50, tenant=f"t{key % 2}")
        for _ in range(key % 5):
            recorded.step()
    return recorded


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replay_does_the_same_work_at_the_same_speed(tmp_path: Path, depth: int) -> None:
    recorded = flown_traffic(depth)
    recorded.finish()
    path = dump(recorded.fd, tmp_path, "test")
    recording = recorded.recording()
    assert is_flight_file(path)

    fit = fit_cost(*flight_steps(path))
    run = simulate(
        flight_trace(path).requests,
        SimulationConfig(
            policy=BatchingPolicy.FAIR,
            cost=fit.cost,
            max_num_seqs=8,
            num_blocks=120,
            max_seq_len=2048,
            scheduler=SchedulerConfig(),
        ),
    )
    summary = summarise(run)

    assert summary.num_requests == 80
    table = run.recorder.table
    num_output = sum(recorded.num_output.values())
    assert int(table.counts("num_output_tokens").sum()) == num_output
    assert sorted(table.tenants) == ["t0", "t1"]
    if depth == 1:
        # In flight, a step's cost shows in the one after it.
        for name in ("step_s", "prefill_token_s", "decode_slot_s", "context_token_s"):
            assert getattr(fit.cost, name) == pytest.approx(getattr(COST, name), rel=0.02)
    steps = recording.steps
    speed = num_output / float(steps["updated_s"][-1] - steps["begun_s"][0])
    assert summary.output_tokens_per_s == pytest.approx(speed, rel=BOUND if depth == 1 else 0.1)


def test_a_live_request_is_replayed_with_its_output_so_far(tmp_path: Path) -> None:
    recorded = flown_traffic(1, 30)
    path = dump(recorded.fd, tmp_path, "test")

    trace = flight_trace(path)

    live = 30 - len(recorded.ends)
    assert live > 3
    assert sum(request.num_output_tokens for request in trace.requests) == sum(
        recorded.num_output.values()
    )
    assert len(trace.requests) + trace.num_left_out == 30
    assert trace.requests[0].arrival_s == 0.0


def test_rejected_load_is_load(tmp_path: Path) -> None:
    recorded = RecordedEngine(num_steps=256)
    recorded.submit(1, 40, 10)
    recorded.submit(2, 40, 20)
    recorded.finish()
    recorded.submit(3, 40, 12, deadline_s=recorded.clock() - 1.0)
    recorded.submit(4, 2000, 5)
    recorded.submit(5, 40, 12)
    recorded.engine.cancel(5)
    recorded.finish()
    assert recorded.ends[5].reason is FinishReason.CANCELLED

    trace = flight_trace(dump(recorded.fd, tmp_path, "test"))

    # The third gets the mean of 10 and 20, but no more than it asked for.
    assert [request.num_output_tokens for request in trace.requests] == [10, 20, 12]
    assert trace.num_left_out == 2


def test_what_cannot_be_replayed_states_why(tmp_path: Path) -> None:
    fd = create_memory(64, "t")
    FlightWriter(fd, make_facts(is_self_paced=True))
    path = dump(fd, tmp_path, "test")

    with pytest.raises(FlightError, match="contains no requests"):
        flight_trace(path)
    with pytest.raises(FlightError, match="self-paced"):
        flight_steps(path)
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes()[:5000])
    assert is_flight_file(cut)
    for read in (flight_trace, flight_steps):
        with pytest.raises(FlightError, match="has 5000 bytes"):
            read(cut)
    other = tmp_path / "trace.jsonl"
    other.write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    assert not is_flight_file(other)
    # Not even read: bytes read from a pipe are lost.
    assert not is_flight_file(tmp_path / "pipe")
