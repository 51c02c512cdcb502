"""Rules of a pool: the connection of each call, and the limit of open calls.

Owns the choice of channels, the limit of generations and their backlog. `connections.py` opens
connections and waits.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.client.errors import DeadlineExceeded, PenstockError
from penstock.client.own_failures import backlog_full

_AVOID_S = 1.0
_MAX_AVOID_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How many connections a client has, and how many generations it sends at a time.

    Calls that do not generate, such as `cancel` and `health`, never wait. Raises ValueError, which
    names the field, for a value out of range.

    Attributes:
        num_channels: Connections to each address. One is enough for a server with one front
            process; for several, about four for each front spread calls evenly, because the
            kernel assigns connections to fronts, not calls.
        max_concurrent_calls: Generations open at a time; None: no limit.
        max_waiting_calls: Generations that may wait for admission; another raises `BacklogFull`.
    """

    num_channels: int = 1
    max_concurrent_calls: int | None = None
    max_waiting_calls: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if self.num_channels < 1:
            raise ValueError(f"num_channels: must be at least 1, not {self.num_channels}")
        if self.max_concurrent_calls is not None and self.max_concurrent_calls < 1:
            raise ValueError(
                f"max_concurrent_calls: must be at least 1 or None, not {self.max_concurrent_calls}"
            )
        if self.max_waiting_calls < 0:
            raise ValueError(
                f"max_waiting_calls: must not be negative, not {self.max_waiting_calls}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The current state of a client's pool.

    Attributes:
        num_channels: Connections that the client may open.
        num_open_channels: Connections that calls have used so far.
        num_open_calls: Generations that are open.
        num_waiting_calls: Generations that wait for admission.
        is_closed: Whether `close` was called.
    """

    num_channels: int
    num_open_channels: int
    num_open_calls: int
    num_waiting_calls: int
    is_closed: bool


class ChannelPicker:
    """Chooses a channel for each attempt: the one with the fewest open calls.

    A channel without a server has no open calls and would attract all of them; after a failure it
    is skipped for a period that grows with each failure, if another channel is usable. Then one
    call at a time tries it, until one gets a response.
    """

    def __init__(self, num_channels: int) -> None:
        self._num_open = [0] * num_channels
        self._num_failures = [0] * num_channels
        self._avoid_until_s = [-math.inf] * num_channels
        self._first: int = 0

    def pick(self, now_s: float) -> int:
        """Take a channel; `release` returns it. Ties are broken in turn."""
        count = len(self._num_open)
        turns = [(self._first + turn) % count for turn in range(count)]
        usable = [index for index in turns if self._is_usable(index, now_s)]
        if usable:
            index = min(usable, key=self._num_open.__getitem__)
        else:
            index = min(turns, key=self._last_resort)
        self._first = (index + 1) % count
        self._num_open[index] += 1
        return index

    def release(self, index: int, *, is_unavailable: bool, now_s: float) -> None:
        """End an attempt; `is_unavailable`: no server served it."""
        self._num_open[index] -= 1
        if not is_unavailable:
            self.answered(index)
        elif self._avoid_until_s[index] <= now_s:
            # Concurrent failures count as one.
            avoid_s = min(_AVOID_S * 2 ** min(self._num_failures[index], 10), _MAX_AVOID_S)
            self._num_failures[index] += 1
            self._avoid_until_s[index] = now_s + avoid_s

    def answered(self, index: int) -> None:
        """Record that a server serves calls on this channel."""
        self._num_failures[index] = 0
        self._avoid_until_s[index] = -math.inf

    def _is_usable(self, index: int, now_s: float) -> bool:
        if not self._num_failures[index]:
            return True
        return self._avoid_until_s[index] <= now_s and not self._num_open[index]

    def _last_resort(self, index: int) -> tuple[float, int]:
        return self._avoid_until_s[index], self._num_open[index]


def is_silence(error: PenstockError, request_id: str) -> bool:
    """Return whether a deadline passed on a request without any response of the server.

    `request_id`: "" for a request that was not accepted. A server that enforces a deadline gives a
    reason.
    """
    return isinstance(error, DeadlineExceeded) and not (error.reason or request_id)


TicketT = TypeVar("TicketT")


class Admission(Generic[TicketT]):
    """Admits a bounded number of calls, and lets a bounded number wait, first come, first served.

    A ticket is a value that wakes a waiting call. Not thread-safe.
    """

    def __init__(self, config: PoolConfig) -> None:
        limit = config.max_concurrent_calls
        self._max_open: float = math.inf if limit is None else limit
        self._max_waiting = config.max_waiting_calls
        self._waiting: deque[TicketT] = deque()
        self.num_open = 0

    @property
    def num_waiting(self) -> int:
        """Number of calls in the backlog."""
        return len(self._waiting)

    def can_enter(self) -> bool:
        """Take a place if one is free and no call waits; return whether it was taken."""
        if self._waiting or self.num_open >= self._max_open:
            return False
        self.num_open += 1
        return True

    def wait(self, ticket: TicketT) -> None:
        """Add a ticket to the backlog. Raises BacklogFull when too many wait."""
        if len(self._waiting) >= self._max_waiting:
            raise backlog_full(self.num_open, len(self._waiting))
        self._waiting.append(ticket)

    def leave(self) -> TicketT | None:
        """Release a place; return the ticket that has it now and must be woken."""
        if self._waiting:
            return self._waiting.popleft()
        self.num_open -= 1
        return None

    def can_give_up(self, ticket: TicketT) -> bool:
        """Stop waiting; return False if the ticket has a place already and must release it."""
        try:
            self._waiting.remove(ticket)
        except ValueError:
            return False
        return True

    def send_away(self) -> tuple[TicketT, ...]:
        """Empty the backlog; return the tickets to notify."""
        tickets = tuple(self._waiting)
        self._waiting.clear()
        return tickets
