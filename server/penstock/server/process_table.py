"""Lists other processes and their resource usage, and sends signals that cannot reach the wrong
process.

Reads /proc and wraps system calls for processes. Linux only: check `is_supported` first.
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
    """One process.

    Attributes:
        pid: The process id. It may be reused; together with `started_ticks` it is unique.
        name: The name of the command, at most 15 characters.
        started_ticks: Start time in clock ticks since boot.
        has_ended: True for a zombie.
    """

    pid: int
    parent_pid: int
    started_ticks: int
    name: str
    has_ended: bool


@dataclass(frozen=True, slots=True)
class UsageSample:
    """The CPU time that a process has used so far, in seconds, and its resident memory in bytes."""

    cpu_s: float
    resident_bytes: int


def is_supported() -> bool:
    """Return True if the other functions here work on this system."""
    return sys.platform == "linux" and (_PROC / "self/stat").exists()


def become_subreaper() -> bool:
    """Become the parent of all descendants that lose their parent; return False if the kernel
    does not permit it.

    This applies to descendants in any session or process group.
    """
    error_code: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return error_code == 0


def entry_of(pid: int) -> ProcessEntry | None:
    """Return the process with this id; None if there is none or if it may not be inspected."""
    if (stat := _stat_of(pid)) is None:
        return None
    name, fields = stat
    return ProcessEntry(
        pid=pid,
        parent_pid=int(fields[1]),
        started_ticks=int(fields[19]),
        name=name.decode(errors="replace"),
        has_ended=fields[0].decode() in _ENDED_STATES,
    )


def usage_of(pid: int) -> UsageSample | None:
    """Return the CPU time and the memory of the process with this id; None if there is none or if
    it may not be inspected."""
    if (stat := _stat_of(pid)) is None:
        return None
    _, fields = stat
    ticks = int(fields[11]) + int(fields[12])
    return UsageSample(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _stat_of(pid: int) -> tuple[bytes, list[bytes]] | None:
    """Return the name of a process and the fields that follow it in /proc/PID/stat, beginning with
    the state (proc_pid_stat(5)).

    Returns None if there is no such process or if it may not be inspected.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name is in parentheses and may itself contain parentheses.
    head, _, tail = text.rpartition(b")")
    return head.partition(b"(")[2], tail.split()


def children_of(pid: int) -> list[ProcessEntry]:
    """Return the processes whose parent is `pid`, including zombies."""
    # The kernel's own list of children is optional, and may skip some while others end.
    return [entry for entry in all_processes() if entry.parent_pid == pid]


def child_with_argument(pid: int, argument: str) -> int | None:
    """Return the id of the newest child of `pid` that has `argument` as one of its command-line
    arguments; None if there is none."""
    children = sorted(children_of(pid), key=lambda entry: entry.started_ticks, reverse=True)
    for child in children:
        with contextlib.suppress(OSError):
            command = (_PROC / str(child.pid) / "cmdline").read_bytes()
            if argument.encode() in command.split(b"\0"):
                return child.pid
    return None


def all_processes() -> list[ProcessEntry]:
    """Return all processes that may be inspected. A process that starts or ends during the call may
    be missing."""
    entries = (entry_of(int(path.name)) for path in _PROC.iterdir() if path.name.isdecimal())
    return [entry for entry in entries if entry is not None]


def was_started_with(pid: int, setting: str) -> bool:
    """Return True if the initial environment of the process contains `setting` (`NAME=value`).

    Returns False if the environment cannot be read.
    """
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return setting.encode() in environment.split(b"\0")


def send_signal(entry: ProcessEntry, number: signal.Signals) -> bool:
    """Send a signal to exactly this process.

    Returns False if the process has ended, or if its parent has changed since `entry` was read.
    Raises PermissionError if the signal is not permitted.
    """
    with contextlib.ExitStack() as stack:
        descriptor = _descriptor_of(entry.pid)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
        # The descriptor always refers to the same process, so the checked process is the one
        # signalled.
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
    """Return a pidfd of the process; None if pidfds are unsupported or the process has ended.

    The parent of a process needs no pidfd, because a child keeps its pid until its parent reaps it.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def reap(pid: int) -> bool:
    """Reap an ended child. Returns False if one of its threads still runs, so that it cannot be
    reaped yet.

    Reaps no other child, because other code waits for the other children.
    """
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # Another waiter has reaped it.


def _identity(entry: ProcessEntry) -> tuple[int, int, int]:
    return entry.pid, entry.started_ticks, entry.parent_pid
