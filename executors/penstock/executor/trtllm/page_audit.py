"""Compares the scheduler's count of used KV cache blocks (the expected number) with the engine's
statistics.

The statistics lag by a fraction of a second, so they are compared with the recent maximum and
minimum of the expected number. Values outside this range (drift) are counted, and logged if the
drift is the largest so far. They are not fatal, because the engine manages its memory.
"""

import logging
from collections import deque

logger = logging.getLogger(__name__)

_MISSED_S = 30.0
_WINDOW_S = 2.0
"""Seconds of the history of the expected number that the engine's statistics are compared with:
the maximum age of the statistics.
"""


class PageAudit:
    """Counts the differences between the scheduler's and the engine's count of blocks in use.

    `num_checks`: comparisons made; `num_drifts`: comparisons with drift; `worst_drift`: the drift
    with the largest magnitude, in blocks, positive if the engine used more than expected;
    `num_missed`: periods of 30 s in which requests ran and no statistics arrived.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self.num_drifts = 0
        self.worst_drift = 0
        self.num_missed = 0
        self._checked_s: float | None = None
        self._expected: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)])

    def record_expected(self, num_blocks: int, now_s: float, *, slack_blocks: int = 0) -> None:
        """Record that, at `now_s`, the scheduler counts `num_blocks` used blocks and the engine may
        use up to `slack_blocks` more.

        The slack consists of blocks allocated ahead for running requests, and of blocks of aborted
        requests that the engine has not released.
        """
        least, most = num_blocks, num_blocks + slack_blocks
        if self._expected[-1][1:] == (least, most):
            return
        self._expected.append((now_s, least, most))
        # Keep the last value before the window: it is the value at the window's start.
        while len(self._expected) > 1 and self._expected[1][0] < now_s - _WINDOW_S:
            self._expected.popleft()

    def expect_check(self, now_s: float, *, is_busy: bool) -> None:
        """Count a missed period if there was no `check` for more than 30 s; call it at each step
        for which no statistics have arrived. `is_busy`: whether requests are in the engine; if not,
        the period begins again.
        """
        if self._checked_s is None or not is_busy:
            self._checked_s = now_s
        elif now_s - self._checked_s > _MISSED_S:
            self._checked_s = now_s
            self.num_missed += 1
            if self.num_missed == 1:
                logger.warning(
                    "the engine ran requests for %g s and reported no statistics: its blocks are"
                    " not compared with the scheduler's account",
                    _MISSED_S,
                )

    def check(self, num_engine_blocks: int) -> int:
        """Compare the engine's number of used blocks with the range recorded for the last 2 s;
        return the distance from that range in blocks, negative if the number is below it, 0 if it
        is within.
        """
        over = num_engine_blocks - max(most for _, _, most in self._expected)
        under = min(least for _, least, _ in self._expected) - num_engine_blocks
        drift = over if over > 0 else -max(under, 0)
        self.num_checks += 1
        self._checked_s = None
        self.num_drifts += drift != 0
        if abs(drift) > abs(self.worst_drift):
            self.worst_drift = drift
            logger.warning(
                "the engine holds %d blocks, %d %s than the scheduler's account allows for",
                num_engine_blocks,
                abs(drift),
                "more" if drift > 0 else "less",
            )
        return drift
