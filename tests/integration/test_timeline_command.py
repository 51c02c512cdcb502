"""Runs `penstock timeline` on the flight record of a killed engine, and `penstock simulate` and
`penstock plan` with that recording as the trace; each as a process.
"""

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import dump
from support.cli_process import finished
from support.trace_invariants import check_trace

_ENGINE = """
import sys, time
import numpy as np
from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec
from penstock.server.observe.flight.layout import facts_of
from penstock.server.observe.listeners import EngineListeners
from penstock.server.observe.flight.writer import FlightWriter

executor = SimulatedExecutor(
    ExecutorConfig(kind=ExecutorKind.SIMULATED, num_blocks=64, max_num_seqs=4, max_seq_len=512)
)
config = SchedulerConfig()
writer = FlightWriter(int(sys.argv[1]), facts_of("demo", 1, executor.info, config))
engine = Engine(executor, config, time.monotonic, listener=EngineListeners(writer))
for key in range(1, 13):
    engine.submit((RequestSpec(
        key=key, request_id=f"r{key}", prompt_ids=np.full(30, 77, np.int32), max_tokens=20,
        arrival_s=time.monotonic(), trace_id=bytes([key]) * 16, tenant="acme",
    ),))
num_ended = 0
while num_ended < 6:
    num_ended += len(engine.step().ends)
print("flying", flush=True)
while engine.has_work:
    engine.step()
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the recording of an engine that was killed while it served."""
    fd = create_memory(256, "test")
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert engine.stdout is not None
    assert engine.stdin is not None
    try:
        assert engine.stdout.readline() == b"flying\n"
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait(60)
        engine.stdin.close()
        engine.stdout.close()
    path = dump(fd, tmp_path_factory.mktemp("flights"), "engine died")
    os.close(fd)
    return path


def test_the_record_of_a_killed_engine_becomes_a_trace(recording: Path) -> None:
    done = finished("timeline", recording)

    assert done.returncode == 0, done.stderr
    output = recording.with_suffix(".json.gz")
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    document = json.loads(gzip.decompress(output.read_bytes()))
    check_trace(document)
    names = {event["name"] for event in document["traceEvents"]}
    assert {f"r{key}" for key in range(1, 7)} <= names
    traces = {
        event["args"]["trace_id"]
        for event in document["traceEvents"]
        if "trace_id" in event.get("args", {})
    }
    assert "01" * 16 in traces
    reported = done.stdout.decode()
    assert "engine       demo on simulated, engine 1" in reported
    assert " LENGTH" in reported
    assert f"timeline     {output}: open it in https://ui.perfetto.dev" in reported


def test_timeline_reads_a_pipe_and_selects_the_last_steps(recording: Path, tmp_path: Path) -> None:
    piped = finished("timeline", "-", "-o", "-", "--last", 5, data=recording.read_bytes())
    assert piped.returncode == 0, piped.stderr
    check_trace(json.loads(piped.stdout))
    assert b"steps        5 (" in piped.stderr

    output = tmp_path / "plain.json"
    assert finished("timeline", recording, "-o", output).returncode == 0
    check_trace(json.loads(output.read_bytes()))

    alone = finished("timeline", "-", data=recording.read_bytes())
    assert alone.returncode == 0
    assert b"perfetto" not in alone.stdout
    assert b"steps" in alone.stdout


def test_timeline_errors_are_reported_in_one_line(recording: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(b"no recording")
    for arguments, code, reason in (
        ((other,), 2, f"{other}: is not a flight record"),
        ((tmp_path / "none.bin",), 5, "No such file"),
        ((recording, "--last", 0), 2, "--last must be at least 1"),
        ((recording, "-o", tmp_path / "no" / "folder.json"), 5, "No such file"),
        (("-",), 2, "standard input: is not a flight record"),
    ):
        done = finished("timeline", *arguments)
        assert done.returncode == code, done
        assert reason in done.stderr.decode()
        assert done.stderr.count(b"\n") == 1


def test_a_recording_is_replayed_and_a_cost_model_fitted_to_it(recording: Path) -> None:
    done = finished(
        *("simulate", "--trace", recording, "--calibrate-from", recording, "--json"),
        *("--num-blocks", 64, "--max-num-seqs", 4, "--no-progress"),
    )

    assert done.returncode == 0, done.stderr
    reported = done.stderr.decode()
    assert "fitted to" in reported
    assert "a flight record of" in reported
    assert "common prefixes of prompts are not recorded" in reported
    document = json.loads(done.stdout)
    assert document["figures"]["num_requests"] >= 6

    planned = finished(
        *("plan", "--trace", recording, "--target-ttft-p99-s", 5, "--target-itl-p99-ms", 500),
        *("--num-blocks", 64, "--max-num-seqs", 4, "--curve-requests", 0, "--no-progress"),
    )
    assert planned.returncode == 0, planned.stderr


def test_a_recording_that_cannot_be_replayed_is_rejected(recording: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes(recording.read_bytes()[:5000])
    for arguments, reason in (
        (("--trace", cut), f"{cut}: has 5000 bytes"),
        (("--calibrate-from", cut), f"{cut}: has 5000 bytes"),
        (("--trace", recording, "--format", "azure"), "is a flight record, not azure"),
    ):
        done = finished("simulate", *arguments)
        assert done.returncode == 2, done
        assert reason in done.stderr.decode()
