"""An engine's steps are written to files and read back. The files have complete lines, a limited
size and no content of requests, and writing them does not block the engine.
"""

import errno
import json
import logging
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, StepEvents
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.server.observe.recording.recorder import Recorder, RecordFile, open_pair
from penstock.tools.simulation.calibration import calibrate
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import summarise
from penstock.tools.simulation.trace_files import read_trace
from support.batches import batch_of
from support.core import make_spec
from support.flights import COST, make_executor

NAMES = ("steps", "requests")


def prompt_of(key: int, length: int) -> list[int]:
    """Return a prompt of `length` tokens. The first 48 tokens are the same for all requests."""
    return [*range(48), *[key] * length][:length]


def spec_of(key: int, num_prompt: int, num_output: int, arrival_s: float) -> RequestSpec:
    prompt = prompt_of(key, num_prompt)
    return make_spec(key, prompt, max_tokens=num_output, block_size=16, arrival_s=arrival_s)


def served(folder: Path, depth: int = 1) -> list[tuple[int, int]]:
    """Run sixty requests through a recorded engine; return the prompt length and output length of
    each.
    """
    clock = VirtualClock()
    recorder = Recorder(folder, block_size=16)
    executor = make_executor(clock, depth=depth, num_blocks=512)
    engine = Engine(executor, SchedulerConfig(), clock, recorder)
    random = np.random.default_rng(5)
    lengths = [(int(random.integers(8, 600)), int(random.integers(1, 40))) for _ in range(60)]
    for key, (num_prompt, num_output) in enumerate(lengths, 1):
        # A front stamped it while the step before was running.
        engine.submit((spec_of(key, num_prompt, num_output, max(0.0, clock() - 1e-4)),))
        for _ in range(int(random.integers(1, 8))):
            engine.step()
    while engine.has_work:
        engine.step()
    recorder.close()
    return lengths


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_served_gives_a_cost_model_and_a_trace(tmp_path: Path, depth: int) -> None:
    lengths = served(tmp_path, depth)

    fit = calibrate(tmp_path / "steps.jsonl")
    trace = list(read_trace(tmp_path / "requests.jsonl"))

    for name in ("step_s", "prefill_token_s", "decode_slot_s", "context_token_s"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(COST, name), rel=1e-3)
    assert fit.num_left_out == 0
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in trace] == lengths


def test_a_recorded_run_is_replayed_step_by_step(tmp_path: Path) -> None:
    served(tmp_path)
    trace = list(read_trace(tmp_path / "requests.jsonl"))
    config = SimulationConfig(
        policy=BatchingPolicy.FAIR,
        cost=COST,
        max_num_seqs=8,
        num_blocks=512,
        max_seq_len=2048,
        scheduler=SchedulerConfig(),
    )
    num_steps = (tmp_path / "steps.jsonl").read_text().count("\n")

    summary = summarise(simulate(trace, config))

    assert summary.num_completed == 60
    assert summary.num_steps == num_steps
    assert summary.prefix_hit_rate > 0.1


def test_files_are_readable_only_by_their_owner_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    (folder).mkdir(mode=0o755)
    (folder / "requests.jsonl").write_text("somebody's")
    (folder / "steps-2.jsonl").symlink_to(tmp_path / "elsewhere")

    first, second = open_pair(folder, NAMES, 100)
    first.close()
    second.close()

    assert (first.path.name, second.path.name) == ("steps-3.jsonl", "requests-3.jsonl")
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert (folder / "requests.jsonl").read_text() == "somebody's"
    assert not (tmp_path / "elsewhere").exists()
    assert not (folder / "steps.jsonl").exists()


def test_a_full_file_ends_with_a_complete_line(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "lines", 10)

    file.write(["1234", "5678", "9", ""])
    file.write(["x"])
    file.close()

    assert file.is_full
    assert file.path.read_text() == "1234\n5678\n"


def test_a_full_disk_leaves_only_complete_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RecordFile(tmp_path / "lines", 1000)
    file.write(["before"])
    write = os.write
    room = [9]

    def write_some(fd: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space left on device")
        taken = write(fd, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="no space"):
        file.write(["1234567", "890"])
    monkeypatch.undo()
    file.close()

    assert file.path.read_text() == "before\n1234567\n"


def note_iteration(
    recorder: Recorder, begun_s: float = 1.0, updated_s: float = 1.25, num_running: int = 0
) -> None:
    """Record a step with three rows: two decodes, and a prompt of one token."""
    arrays = SlotArrays(num_slots=3, max_seq_len=16, block_size=16)
    batch = batch_of(arrays, [(0, 0, 1), (1, 0, 1), (2, 0, 1)], num_decodes=2)
    note = StepNote(
        *(batch, begun_s, begun_s, 1, 3, math.nan, None, updated_s, updated_s),
        *(num_running, 0, 0, 0, 0, 0),
    )
    events = StepEvents(
        step=1,
        at_s=updated_s,
        keys=np.array([1], dtype=np.int64),
        ends=(Completed(key=1, at_s=0.0, reason=FinishReason.STOP),),
    )
    recorder.note_iteration(events, note)


def test_a_step_lasts_from_the_end_of_the_one_before_while_there_is_work(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, block_size=16)

    note_iteration(recorder, 1.0, 2.0, num_running=1)
    # begun half a second after the last one ended, because of frames
    note_iteration(recorder, 2.5, 4.0)
    note_iteration(recorder, 8.0, 9.0, num_running=1)  # there was nothing to do
    recorder.note_iteration(StepEvents(step=1, at_s=9.5), None)  # nothing could run
    note_iteration(recorder, 11.0, 12.0, num_running=1)
    note_iteration(recorder, 11.5, 13.0)  # launched before the one before it ended
    recorder.close()

    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["seconds"] for line in lines] == [1.0, 2.0, 1.0, 1.0, 1.0]


def test_steps_of_a_self_paced_executor_have_no_time(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, block_size=16, is_self_paced=True)

    note_iteration(recorder)
    recorder.close()

    assert (tmp_path / "steps.jsonl").read_text() == ""


def test_a_disk_that_fails_is_reported_once_and_serving_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, block_size=16)

    def fail(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            note_iteration(recorder)
            recorder.drain()
        recorder.close()

    assert not recorder.is_recording
    assert [record.message for record in caplog.records] == [
        "recording stopped: [Errno 28] no space left on device"
    ]


def test_a_disk_that_does_not_keep_up_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, block_size=16, max_backlog=2)

    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            note_iteration(recorder)

    assert not recorder.is_recording
    assert len(caplog.records) == 1
    assert "too slow" in caplog.text
    recorder.close()


def test_two_full_files_end_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, block_size=16, max_bytes=10)

    recorder.note_submit((spec_of(1, 20, 2, 0.0),))
    note_iteration(recorder)
    recorder.drain()

    assert not recorder.is_recording
    assert caplog.text.count("has reached its size limit") == 2
    recorder.close()
    assert (tmp_path / "steps.jsonl").read_text() == ""


def test_its_thread_writes_all_before_it_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, block_size=16)
    recorder.start()

    recorder.note_submit((spec_of(1, 20, 2, 0.0),))
    note_iteration(recorder)
    recorder.close()
    recorder.close()
    note_iteration(recorder)

    assert (tmp_path / "steps.jsonl").read_text() == (
        '{"num_prefill_tokens":1,"num_decodes":2,"num_context_tokens":3,"seconds":0.25}\n'
    )
    assert [one.num_prompt_tokens for one in read_trace(tmp_path / "requests.jsonl")] == [20]
