"""One write at a time that a reader may block, and how to interrupt it.

Owns which task writes, since when, and the difference between an interrupted writer and one whose
peer left: both see a CancelledError. Does not know what is written.
"""

import asyncio
from typing import Final

from penstock.scheduler.request import NO_TIME

STALL_S: Final = 0.05
"""A longer write counts as waiting for its reader."""


class WatchedWrite:
    """The current write.

    `blocked_since_s`: since when the reader is waited for: the start of the current write, NO_TIME
    between writes. `num_writes`: completed writes.
    """

    __slots__ = (
        "_cut_writer",
        "_num_stalls",
        "_stalled_s",
        "_writer",
        "blocked_since_s",
        "num_writes",
    )

    def __init__(self) -> None:
        self._writer: asyncio.Task[object] | None = None
        self._cut_writer: asyncio.Task[object] | None = None
        self.blocked_since_s = NO_TIME
        self.num_writes = 0
        self._stalled_s = 0.0
        self._num_stalls = 0

    def begin_write(self, now_s: float) -> None:
        """The calling task starts a write, which its reader may block."""
        self.blocked_since_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self, now_s: float) -> None:
        """The write is complete."""
        if now_s - self.blocked_since_s > STALL_S:
            self._stalled_s += now_s - self.blocked_since_s - STALL_S
            self._num_stalls += 1
        self.num_writes += 1
        self.blocked_since_s = NO_TIME
        self._writer = None

    def stalls(self, now_s: float) -> tuple[float, int]:
        """Seconds by which writes took longer than STALL_S, and how many did, up to now."""
        open_s = now_s - self.blocked_since_s - STALL_S
        if open_s > 0:
            return self._stalled_s + open_s, self._num_stalls + 1
        return self._stalled_s, self._num_stalls

    def wait_for_reader(self, now_s: float) -> None:
        """Record that the reader blocks the writer by giving no credit."""
        self.blocked_since_s = now_s

    def break_off(self) -> None:
        """Interrupt the current write, if there is one."""
        if self._writer is not None:
            self._cut_writer = self._writer
            self._writer.cancel()

    def was_cut_off(self) -> bool:
        """Whether the CancelledError just caught came from `break_off` alone.

        If so the calling task is no longer being cancelled and may report the reason to its peer.
        """
        task = asyncio.current_task()
        if task is None or self._cut_writer is not task:
            return False
        self._cut_writer = None
        return task.uncancel() == 0
