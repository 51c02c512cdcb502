"""One write at a time that a reader may block, and the way out of it.

Owns who writes, since when, and the difference between a writer that was cut off and one whose peer
left: both see a CancelledError. Does not know what is written.
"""

import asyncio

from penstock.scheduler.request import NO_TIME


class WatchedWrite:
    """Who writes.

    `blocked_since_s`: since when it is the reader that is waited for: when the write under way
    began, NO_TIME between writes.
    """

    __slots__ = ("_cut_writer", "_writer", "blocked_since_s")

    def __init__(self) -> None:
        self._writer: asyncio.Task[object] | None = None
        self._cut_writer: asyncio.Task[object] | None = None
        self.blocked_since_s = NO_TIME

    def begin_write(self, now_s: float) -> None:
        """The calling task is about to write and may be blocked by its reader."""
        self.blocked_since_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self) -> None:
        """The write went through."""
        self.blocked_since_s = NO_TIME
        self._writer = None

    def wait_for_reader(self, now_s: float) -> None:
        """Nothing is written, because the reader has not said that it may be."""
        self.blocked_since_s = now_s

    def break_off(self) -> None:
        """Get the writer out of the write it is in, if it is in one."""
        if self._writer is not None:
            self._cut_writer = self._writer
            self._writer.cancel()

    def was_cut_off(self) -> bool:
        """Whether the CancelledError just caught came from `break_off` alone.

        If so the calling task is no longer being cancelled and may go on to tell its peer why.
        """
        task = asyncio.current_task()
        if task is None or self._cut_writer is not task:
            return False
        self._cut_writer = None
        return task.uncancel() == 0
