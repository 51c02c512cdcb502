"""The rules of the connection pool: which connection a call uses, and how many generations are
open.

Chooses channels, limits the number of generations, and keeps the backlog of waiting generations.
`connections.py` opens connections and waits.
"""

import math
from collections import deque
from dataclasses import dataclass
from numbers import Integral
from typing import Generic, TypeVar

from penstock.client.argument_types import require_number
from penstock.client.errors import DeadlineExceeded, PenstockError
from penstock.client.local_errors import backlog_full

_SKIP_S = 1.0
_MAX_SKIP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How many connections a client has, and how many generations it sends at the same time.

    Calls that do not generate, such as `cancel` and `health`, never wait. Raises ValueError or
    TypeError, naming the field, if one is invalid.

    Attributes:
        num_channels: Connections to each address. One is enough for a server with one front
            (gRPC server process). With several fronts, about four for each distribute calls evenly,
            because the kernel distributes connections, not calls.
        max_concurrent_calls: Maximum number of open generations; None for no limit.
        max_waiting_calls: Maximum number of generations that wait for admission. A further one
            raises `BacklogFull`.
    """

    num_channels: int = 1
    max_concurrent_calls: int | None = None
    max_waiting_calls: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError, naming the field, if one is invalid."""
        require_number(self.num_channels, "num_channels", Integral, at_least=1)
        if self.max_concurrent_calls is not None:
            require_number(self.max_concurrent_calls, "max_concurrent_calls", Integral, at_least=1)
        require_number(self.max_waiting_calls, "max_waiting_calls", Integral, at_least=0)


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

    A channel without a server has no open calls and would attract all of them. Therefore after a
    failure a channel is skipped for a period that grows with each failure, if another channel is
    usable. After that period one call at a time tries it, until one gets a response.
    """

    def __init__(self, num_channels: int) -> None:
        self._num_open = [0] * num_channels
        self._num_failures = [0] * num_channels
        self._skip_until_s = [-math.inf] * num_channels
        self._first: int = 0

    def pick(self, now_s: float) -> int:
        """Choose a channel and return its index. The caller must `release` it.

        Ties are broken by round robin. If all channels are being skipped, the one whose period ends
        first is chosen.
        """
        count = len(self._num_open)
        order = [(self._first + turn) % count for turn in range(count)]
        usable = [index for index in order if self._is_usable(index, now_s)]
        if usable:
            index = min(usable, key=self._num_open.__getitem__)
        else:
            index = min(order, key=self._end_of_skip)
        self._first = (index + 1) % count
        self._num_open[index] += 1
        return index

    def release(self, index: int, *, is_unavailable: bool, now_s: float) -> None:
        """Record the end of an attempt. `is_unavailable` is True if no server responded to it."""
        self._num_open[index] -= 1
        if not is_unavailable:
            self.note_response(index)
        elif self._skip_until_s[index] <= now_s:
            # Concurrent failures are counted as one.
            skip_s = min(_SKIP_S * 2 ** min(self._num_failures[index], 10), _MAX_SKIP_S)
            self._num_failures[index] += 1
            self._skip_until_s[index] = now_s + skip_s

    def note_response(self, index: int) -> None:
        """Record that a server responds on this channel."""
        self._num_failures[index] = 0
        self._skip_until_s[index] = -math.inf

    def _is_usable(self, index: int, now_s: float) -> bool:
        if not self._num_failures[index]:
            return True
        return self._skip_until_s[index] <= now_s and not self._num_open[index]

    def _end_of_skip(self, index: int) -> tuple[float, int]:
        return self._skip_until_s[index], self._num_open[index]


def is_unanswered(error: PenstockError, request_id: str) -> bool:
    """Return True if the deadline of a request passed without any response from the server.

    `request_id` is "" for a request that was not accepted. A deadline error from a server has a
    reason; one that gRPC raised in the client has none.
    """
    return isinstance(error, DeadlineExceeded) and not (error.reason or request_id)


TicketT = TypeVar("TicketT")


class Admission(Generic[TicketT]):
    """Admits a limited number of calls, and queues a limited number of others, first come, first
    served.

    A ticket is the caller's value for a waiting call, with which it wakes the call. Not
    thread-safe.
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

    def try_admit(self) -> bool:
        """Admit a call if the limit of open calls allows it and no other call waits.

        Returns True if it was admitted.
        """
        if self._waiting or self.num_open >= self._max_open:
            return False
        self.num_open += 1
        return True

    def enqueue(self, ticket: TicketT) -> None:
        """Add the ticket of a call to the backlog. Raises BacklogFull if too many calls wait."""
        if len(self._waiting) >= self._max_waiting:
            raise backlog_full(self.num_open, len(self._waiting))
        self._waiting.append(ticket)

    def release(self) -> TicketT | None:
        """Record that an open call has ended; return the ticket of the call that is admitted
        instead.

        The caller must wake that call. Returns None if no call waits.
        """
        if self._waiting:
            return self._waiting.popleft()
        self.num_open -= 1
        return None

    def try_remove(self, ticket: TicketT) -> bool:
        """Remove a ticket from the backlog. Returns False if it is no longer there: its call was
        admitted, and must `release`, or was rejected."""
        try:
            self._waiting.remove(ticket)
        except ValueError:
            return False
        return True

    def reject_all(self) -> tuple[TicketT, ...]:
        """Empty the backlog and return its tickets. The caller must wake their calls."""
        tickets = tuple(self._waiting)
        self._waiting.clear()
        return tickets
