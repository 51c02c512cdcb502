"""Notices an engine that died without a word, a request it forgot, and one that fails everybody.

Owns what the engine owes: a word about each request it was handed. Only its own words count, never
what our side says for it (an abort given up, a request refused before it went in), or a service
whose clients give up soon would never find out.
"""

from collections.abc import Iterable

from penstock.executor.trtllm.arrivals import Arrival
from penstock.executor.trtllm.seat import Seat
from penstock.scheduler.executor import ExecutorDied

_LOOK_INTERVAL_S = 1.0


class Vigil:
    """Watches over one engine; times are seconds on the caller's clock.

    `timeout_s`: how long the engine may owe its next word, to all together and to each.
    `max_failures_in_row`: how many requests may fail one after another, by no fault of their own,
    with no token of anybody in between.
    """

    def __init__(self, *, timeout_s: float, max_failures_in_row: int, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._max_failures_in_row = max_failures_in_row
        self._owed_since_s: dict[Seat, float] = {}
        self._silence_s = 0.0
        self._looked_s = now_s
        self._next_search_s = now_s
        self._num_failures_in_row = 0

    def handed_over(self, seats: Iterable[Seat], now_s: float) -> None:
        """The engine has these from now on."""
        self._count_silence(now_s)
        self._owed_since_s.update((seat, now_s) for seat in seats)

    def forget(self, seat: Seat, now_s: float) -> None:
        """Nobody waits for this one any more."""
        self._count_silence(now_s)
        self._owed_since_s.pop(seat, None)

    def note(self, news: Iterable[Arrival], now_s: float) -> None:
        """What arrived."""
        for arrival in news:
            if arrival.is_last:
                self._owed_since_s.pop(arrival.seat, None)
            if arrival.is_own:
                continue
            self._silence_s = 0.0
            self._looked_s = now_s
            if arrival.seat in self._owed_since_s:
                self._owed_since_s[arrival.seat] = now_s
            if arrival.tokens:
                self._num_failures_in_row = 0
            elif arrival.failure and not arrival.is_refusal:
                self._num_failures_in_row += 1

    def look(self, now_s: float) -> list[Seat]:
        """Requests that the engine has forgotten, each told once.

        Raises ExecutorDied when it owes words and says none, or fails everyone.
        """
        self._count_silence(now_s)
        if self._silence_s > self._timeout_s:
            raise ExecutorDied(
                f"the engine owed a word for {self._silence_s:.0f} s, now about"
                f" {len(self._owed_since_s)} requests, and said nothing"
            )
        if self._num_failures_in_row >= self._max_failures_in_row:
            raise ExecutorDied(
                f"the engine failed {self._num_failures_in_row} requests one after another"
            )
        if now_s < self._next_search_s:
            return []
        self._next_search_s = now_s + _LOOK_INTERVAL_S
        limit_s = now_s - self._timeout_s
        lost = [seat for seat, since_s in self._owed_since_s.items() if since_s < limit_s]
        for seat in lost:
            del self._owed_since_s[seat]
        return lost

    def _count_silence(self, now_s: float) -> None:
        if self._owed_since_s:
            self._silence_s += now_s - self._looked_s
        self._looked_s = now_s
