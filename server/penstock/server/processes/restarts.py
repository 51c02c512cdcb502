"""Restart policy: back-off and crash-loop detection.

Owns the back-off and the count of deaths in a sliding window. Has no clock.
"""

from collections import deque

MAX_DEATHS = 5
WINDOW_S = 60.0
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


class RestartPolicy:
    """The deaths of one supervised process."""

    def __init__(self, max_deaths: int = MAX_DEATHS, window_s: float = WINDOW_S) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._deaths_s: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Record a death; returns the seconds to wait before the next start, None to give up.

        The first death in a window restarts at once, then the delay doubles.
        """
        deaths = self._deaths_s
        deaths.append(now_s)
        while deaths[0] <= now_s - self._window_s:
            deaths.popleft()
        if len(deaths) >= self._max_deaths:
            return None
        if len(deaths) == 1:
            return 0.0
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** (len(deaths) - 2))
