"""Tracks the requests inside the engine, and which may enter next.

Owns the order of submission and the one thing that the scheduler cannot see: an aborted request
keeps its blocks until the engine has released it, an iteration later or so, while its slot is free
at once. Does not call the engine.
"""

from collections import deque
from collections.abc import Iterator

from penstock.executor.trtllm.submitted_request import SubmittedRequest


class BlockAccount:
    """Requests admitted by the scheduler, in its order.

    `max_num_seqs` and `num_blocks`: the engine's limits, which the requests inside never exceed: a
    request waits here while leaving ones still hold what it needs.
    """

    def __init__(self, *, max_num_seqs: int, num_blocks: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._waiting: deque[SubmittedRequest] = deque()
        self._inside: set[SubmittedRequest] = set()
        self._leaving: set[SubmittedRequest] = set()
        self._unanswered: set[SubmittedRequest] = set()

    @property
    def num_inside(self) -> int:
        """Requests that the engine has not released."""
        return len(self._inside) + len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Requests that were admitted but not submitted yet."""
        return len(self._waiting)

    @property
    def num_unanswered_blocks(self) -> int:
        """Blocks of requests without a response so far: the engine may not have allocated them."""
        return sum(each.num_blocks for each in self._unanswered)

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that aborted requests may still hold."""
        return sum(each.num_blocks for each in self._leaving)

    def admit(self, submitted: SubmittedRequest) -> None:
        """Add a request to which the scheduler gave a slot."""
        self._waiting.append(submitted)
        self._unanswered.add(submitted)

    def on_response(self, submitted: SubmittedRequest) -> None:
        """The engine returned a response for it."""
        self._unanswered.discard(submitted)

    def enter(self) -> Iterator[SubmittedRequest]:
        """The requests that enter now, in order; each is inside when it is yielded."""
        while self._waiting and self._has_room(self._waiting[0]):
            submitted = self._waiting.popleft()
            self._inside.add(submitted)
            yield submitted

    def release(self, submitted: SubmittedRequest) -> bool:
        """The scheduler took its slot back; True when the engine must abort it."""
        self._unanswered.discard(submitted)
        if submitted in self._inside:
            self._inside.discard(submitted)
            self._leaving.add(submitted)
            return True
        if submitted in self._waiting:
            self._waiting.remove(submitted)
        return False

    def on_end(self, submitted: SubmittedRequest) -> None:
        """The engine has released it."""
        self._inside.discard(submitted)
        self._leaving.discard(submitted)

    def _has_room(self, submitted: SubmittedRequest) -> bool:
        # While no request leaves, the scheduler's account equals the engine's.
        if not self._leaving:
            return True
        if self.num_inside >= self._max_num_seqs:
            return False
        # Shared blocks count twice here, which can only delay it until they have left.
        held = sum(each.num_blocks for each in self._inside)
        return held + self.num_leaving_blocks + submitted.num_blocks <= self._num_blocks
