"""What the kernel says of other processes, and signals that cannot hit the wrong one.

Owns the reading of /proc and the calls around it. Does not know what a process is for. Linux only:
whoever calls asks `is_supported` first.
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
    """One process. Its pid may go to another later: `pid` with `started_ticks` never does.

    `name`: the command's, at most 15 characters. `started_ticks`: clock ticks since boot.
    `has_ended`: it has, and waits for its parent to ask how.
    """

    pid: int
    parent_pid: int
    started_ticks: int
    name: str
    has_ended: bool


def is_supported() -> bool:
    """True where the other functions here work."""
    return sys.platform == "linux" and (_PROC / "self/stat").exists()


def become_subreaper() -> bool:
    """Become the parent of every descendant that loses its own; False if the kernel refuses.

    It holds for whatever session or process group a descendant puts itself in.
    """
    refusal: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return refusal == 0


def entry_of(pid: int) -> ProcessEntry | None:
    """The process with this pid; None when there is none, or none that we may look at."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name stands in brackets and may hold anything, brackets too.
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
    """The processes whose parent is `pid`, the ended ones too."""
    # The kernel's own list of children is optional, and skips some while others end.
    return [entry for entry in all_processes() if entry.parent_pid == pid]


def all_processes() -> list[ProcessEntry]:
    """Every process that we may look at; none that lives all the while is missing."""
    entries = (entry_of(int(path.name)) for path in _PROC.iterdir() if path.name.isdecimal())
    return [entry for entry in entries if entry is not None]


def was_started_with(pid: int, setting: str) -> bool:
    """True if `NAME=value` is in the environment the process began with, as far as we may see."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return setting.encode() in environment.split(b"\0")


def send_signal(entry: ProcessEntry, number: signal.Signals) -> bool:
    """Signal this very process; False when it is gone or has another parent by now.

    Raises PermissionError when it is not ours to signal.
    """
    with contextlib.ExitStack() as stack:
        descriptor = _descriptor_of(entry.pid)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
        # The descriptor stays with one process: what is checked now is what is hit.
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
    """A descriptor of the process; None where kernel or container do not know such, or it is gone.

    A child's pid stays with it until its parent reaps it, so that its parent can do without.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def reap(pid: int) -> bool:
    """Take an ended child's exit status; False while a thread of it lives on.

    Asks for that pid and no other: the rest have someone who waits for them.
    """
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # someone has


def _identity(entry: ProcessEntry) -> tuple[int, int, int]:
    return entry.pid, entry.started_ticks, entry.parent_pid
