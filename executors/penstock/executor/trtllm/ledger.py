"""Who is inside the engine, and who may go in next.

Owns the order of hand-over and the one thing the scheduler cannot see: an aborted request keeps its
pages until the engine has let go of it, an iteration later or so, while its slot is free at once.
Does not talk to the engine.
"""

from collections import deque
from collections.abc import Iterator

from penstock.executor.trtllm.seat import Seat


class Ledger:
    """Seats admitted by the scheduler, in its order.

    `max_num_seqs` and `num_blocks`: what the engine runs and holds. Nothing is ever inside beyond
    them: a seat waits here while those who leave still hold what it needs.
    """

    def __init__(self, *, max_num_seqs: int, num_blocks: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._waiting: deque[Seat] = deque()
        self._inside: set[Seat] = set()
        self._leaving: set[Seat] = set()
        self._unheard: set[Seat] = set()

    @property
    def num_inside(self) -> int:
        """Requests that the engine has not let go of."""
        return len(self._inside) + len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Requests that were admitted and not handed over yet."""
        return len(self._waiting)

    @property
    def num_unheard_blocks(self) -> int:
        """Pages of those of whom the engine has said nothing yet: it may not hold them."""
        return sum(seat.num_blocks for seat in self._unheard)

    @property
    def num_leaving_blocks(self) -> int:
        """Pages that aborted requests may still hold."""
        return sum(seat.num_blocks for seat in self._leaving)

    def admit(self, seat: Seat) -> None:
        """The scheduler gave it a slot."""
        self._waiting.append(seat)
        self._unheard.add(seat)

    def heard(self, seat: Seat) -> None:
        """The engine spoke of it."""
        self._unheard.discard(seat)

    def enter(self) -> Iterator[Seat]:
        """Those who go in now, in order; each is inside when it is yielded."""
        while self._waiting and self._has_room(self._waiting[0]):
            seat = self._waiting.popleft()
            self._inside.add(seat)
            yield seat

    def release(self, seat: Seat) -> bool:
        """The scheduler took its slot back; True when the engine must be told."""
        self._unheard.discard(seat)
        if seat in self._inside:
            self._inside.discard(seat)
            self._leaving.add(seat)
            return True
        if seat in self._waiting:
            self._waiting.remove(seat)
        return False

    def gone(self, seat: Seat) -> None:
        """The engine has let go of it."""
        self._inside.discard(seat)
        self._leaving.discard(seat)

    def _has_room(self, seat: Seat) -> bool:
        # While nobody leaves, the scheduler's account is the engine's.
        if not self._leaving:
            return True
        if self.num_inside >= self._max_num_seqs:
            return False
        # Shared pages count twice here, which can only make it wait until they have left.
        held = sum(each.num_blocks for each in self._inside)
        return held + self.num_leaving_blocks + seat.num_blocks <= self._num_blocks
