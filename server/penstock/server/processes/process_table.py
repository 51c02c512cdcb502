"""Other processes as the kernel lists them, and signals that cannot reach the wrong process.

Reads /proc and wraps the system calls around it. Linux only: check `is_supported` first.
"""

import contextlib
import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_ENDED_STATES = frozenset("ZXx")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """One process. A pid may be reused; `pid` with `started_ticks` is unique.

    `name`: of the command, at most 15 characters. `started_ticks`: clock ticks since boot.
    `has_ended`: it is a zombie.
    """

    pid: int
    parent_pid: int
    started_ticks: int
    name: str
    has_ended: bool


def is_supported() -> bool:
    """Return whether the other functions here work."""
    return sys.platform == "linux" and (_PROC / "self/stat").exists()


def become_subreaper() -> bool:
    """Become the parent of every descendant that loses its own; return False if the kernel refuses.

    This applies to descendants in any session or process group.
    """
    refusal: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return refusal == 0


def entry_of(pid: int) -> ProcessEntry | None:
    """Return the process with this pid; None if there is none or it may not be inspected."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name is in brackets and may itself contain brackets.
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return ProcessEntry(
        pid=pid,
        parent_pid=int(fields[1]),
        started_ticks=int(fields[19]),
        name=head.partition(b"(")[2].decode(errors="replace"),
        has_ended=fields[0].decode() in _ENDED_STATES,
    )


def children_of(pid: int) -> list[ProcessEntry]:
    """Return the processes whose parent is `pid`, zombies included."""
    # The kernel's own list of children is optional, and skips some while others end.
    return [entry for entry in all_processes() if entry.parent_pid == pid]


def all_processes() -> list[ProcessEntry]:
    """Return every process that may be inspected, including all that live during the whole call."""
    entries = (entry_of(int(path.name)) for path in _PROC.iterdir() if path.name.isdecimal())
    return [entry for entry in entries if entry is not None]


def was_started_with(pid: int, setting: str) -> bool:
    """Return whether the environment that the process started with has `NAME=value`, if
    readable.
    """
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return setting.encode() in environment.split(b"\0")


def send_signal(entry: ProcessEntry, number: signal.Signals) -> bool:
    """Signal exactly this process; return False if it has ended or has another parent by now.

    Raises PermissionError if that is not permitted.
    """
    with contextlib.ExitStack() as stack:
        descriptor = _descriptor_of(entry.pid)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
        # The descriptor stays with one process: the process that is checked is the one signalled.
        now = entry_of(entry.pid)
        if now is None or _identity(now) != _identity(entry):
            return False
        try:
            if descriptor is not None:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(entry.pid, number)
        except ProcessLookupError:
            return False
        return True


def _descriptor_of(pid: int) -> int | None:
    """Return a pidfd of the process; None if it is not supported, or the process has ended.

    A child keeps its pid until its parent reaps it, so that its parent needs no pidfd.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def reap(pid: int) -> bool:
    """Reap an ended child; return False while one of its threads still runs.

    Waits for this pid only: other children have their own waiters.
    """
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # another waiter has reaped it


def _identity(entry: ProcessEntry) -> tuple[int, int, int]:
    return entry.pid, entry.started_ticks, entry.parent_pid
