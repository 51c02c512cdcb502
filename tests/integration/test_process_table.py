"""The process table reads entries from /proc for real processes, and signals those processes."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from penstock.server.process_table import (
    ProcessEntry,
    child_with_argument,
    children_of,
    entry_of,
    reap,
    send_signal,
    usage_of,
    was_started_with,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    program = tmp_path / "a) (b c"
    program.symlink_to("/bin/cat")
    environment, pipe = {"MARK": "one two", "NEXT": "x"}, subprocess.PIPE
    with subprocess.Popen([program], env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # Before its first output, its name and environment may not be set yet.
        process.stdin.write(b"there\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"there\n"
        yield process
        process.kill()


def entry_for(process: "subprocess.Popen[bytes]") -> ProcessEntry:
    entry = entry_of(process.pid)
    assert entry is not None
    return entry


def test_an_entry_contains_what_the_kernel_reports(sleeper: "subprocess.Popen[bytes]") -> None:
    entry = entry_for(sleeper)
    assert entry.name == "a) (b c"
    assert entry.parent_pid == os.getpid()
    assert not entry.has_ended
    here = entry_of(os.getpid())
    assert here is not None
    assert entry.started_ticks >= here.started_ticks > 0
    assert entry in children_of(os.getpid())
    assert entry not in children_of(os.getppid())


def test_the_usage_is_that_of_the_process(sleeper: "subprocess.Popen[bytes]") -> None:
    usage = usage_of(sleeper.pid)
    assert usage is not None
    assert usage.cpu_s >= 0
    assert usage.resident_bytes > 0
    sleeper.kill()
    sleeper.wait()
    assert usage_of(sleeper.pid) is None


def test_a_child_is_found_by_a_whole_argument(sleeper: "subprocess.Popen[bytes]") -> None:
    (program,) = (str(argument) for argument in cast("list[Path]", sleeper.args))
    assert child_with_argument(os.getpid(), program) == sleeper.pid
    assert child_with_argument(os.getpid(), program[:-1]) is None
    assert child_with_argument(os.getppid(), program) is None


def test_the_environment_is_matched_whole(sleeper: "subprocess.Popen[bytes]") -> None:
    assert was_started_with(sleeper.pid, "MARK=one two")
    assert not was_started_with(sleeper.pid, "MARK=one")
    assert not was_started_with(sleeper.pid, "ARK=one two")


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_signal_reaches_its_process_and_its_end_is_reported_once(
    sleeper: "subprocess.Popen[bytes]", has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(pid: int) -> int:
        raise OSError("an old container")

    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", reject)
    entry = entry_for(sleeper)
    assert not reap(sleeper.pid), "it lives"
    assert send_signal(entry, signal.SIGTERM)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert entry_for(sleeper).has_ended
    assert reap(sleeper.pid)
    assert entry_of(sleeper.pid) is None
    assert reap(sleeper.pid), "by now it is done"
    assert not send_signal(entry, signal.SIGTERM)


def test_another_process_with_the_same_pid_is_not_signalled(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    entry = entry_for(sleeper)
    assert not send_signal(dataclasses.replace(entry, started_ticks=1), signal.SIGKILL)
    assert not send_signal(dataclasses.replace(entry, parent_pid=1), signal.SIGKILL)
    assert send_signal(entry_for(sleeper), signal.SIGCONT), "it is there still"
    assert not entry_for(sleeper).has_ended
