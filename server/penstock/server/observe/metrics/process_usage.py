"""What each process of the service costs the machine, read from /proc.

Owns the reading. A process that is gone, or a system without /proc, tells nothing.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.server.observe.metrics import catalogue
from penstock.server.observe.metrics.board import Board

Processes = Callable[[], Mapping[str, int]]
"""Names such as `engine`, `front` or `supervisor` and their process ids, now."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time used so far, and memory held."""

    cpu_s: float
    resident_bytes: int


def usage_of(pid: int, proc: Path = Path("/proc")) -> Usage | None:
    """What a process uses; None if that cannot be told."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program stands in parentheses and may hold anything; see proc_pid_stat(5).
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 22:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Usage(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


class ProcessUsage:
    """Tells a board of the service's processes, whenever it is asked to."""

    def __init__(self, board: Board, processes: Processes) -> None:
        self._board = board
        self._processes = processes
        self._told: dict[tuple[str, int], float] = {}

    def tell(self) -> None:
        """Read anew. CPU time of a name goes on counting over the processes that bore it."""
        memory = self._board.gauge(catalogue.PROCESS_MEMORY)
        memory.clear()
        told: dict[tuple[str, int], float] = {}
        for name, pid in self._processes().items():
            if (usage := usage_of(pid)) is None:
                continue
            memory.set(usage.resident_bytes, name)
            before = self._told.get((name, pid), 0.0)
            told[name, pid] = max(before, usage.cpu_s)
            self._board.counter(catalogue.PROCESS_CPU).add(told[name, pid] - before, name)
        self._told = told
