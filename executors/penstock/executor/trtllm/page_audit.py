"""Compares the scheduler's page mirror with the engine's statistics.

The statistics lag by a fraction of a second, so they are compared with the mirror's recent maximum
and minimum. Values outside this range are drift: counted, reported, never fatal, since the engine
itself guards its memory.
"""

import logging
from collections import deque

log = logging.getLogger(__name__)

_MISSED_S = 30.0
_WINDOW_S = 2.0
"""Maximum age of the engine's statistics."""


class PageAudit:
    """Counts by how many pages the mirror and the engine differ.

    `num_checks`: comparisons; `num_drifts`: comparisons with drift; `worst_drift`: in blocks,
    positive when the engine holds more than predicted, negative when it holds less; `num_missed`:
    periods in which requests ran and no statistics arrived.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self.num_drifts = 0
        self.worst_drift = 0
        self.num_missed = 0
        self._checked_s: float | None = None
        self._mirror: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)])

    def note_mirror(self, num_blocks: int, now_s: float, *, slack_blocks: int = 0) -> None:
        """Record that the mirror has `num_blocks`, and that the engine may hold `slack_blocks`
        more.

        The slack is pages ahead of running requests, and pages of aborted requests that have not
        left.
        """
        least, most = num_blocks, num_blocks + slack_blocks
        if self._mirror[-1][1:] == (least, most):
            return
        self._mirror.append((now_s, least, most))
        # Keep the last value before the window: it is the value at the window's start.
        while len(self._mirror) > 1 and self._mirror[1][0] < now_s - _WINDOW_S:
            self._mirror.popleft()

    def expect_check(self, now_s: float, *, is_busy: bool) -> None:
        """Count a missed period when requests have been running for long without a `check`."""
        if self._checked_s is None or not is_busy:
            self._checked_s = now_s
        elif now_s - self._checked_s > _MISSED_S:
            self._checked_s = now_s
            self.num_missed += 1
            if self.num_missed == 1:
                log.warning(
                    "the engine ran requests for %g s and reported no statistics: its blocks are"
                    " not compared with the scheduler's account",
                    _MISSED_S,
                )

    def check(self, num_engine_blocks: int) -> int:
        """Compare the mirror with the statistics; return the drift in blocks."""
        over = num_engine_blocks - max(most for _, _, most in self._mirror)
        under = min(least for _, least, _ in self._mirror) - num_engine_blocks
        drift = over if over > 0 else -max(under, 0)
        self.num_checks += 1
        self._checked_s = None
        self.num_drifts += drift != 0
        if abs(drift) > abs(self.worst_drift):
            self.worst_drift = drift
            log.warning(
                "the engine holds %d blocks, %d %s than the scheduler's account allows for",
                num_engine_blocks,
                abs(drift),
                "more" if drift > 0 else "less",
            )
        return drift
