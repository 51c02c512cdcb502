"""Tracks the requests inside the engine, and decides which requests may enter next.

Owns the order of submission, and a fact that the scheduler cannot see: an aborted request keeps its
blocks until the engine has released it, about an iteration later, while its slot is free at once.
Does not call the engine.
"""

from collections import deque
from collections.abc import Iterator

from penstock.executor.trtllm.submitted_request import SubmittedRequest


class BlockAccount:
    """Requests admitted by the scheduler, in its order.

    `max_num_seqs` and `num_blocks`: the engine's limits, which the requests inside never exceed. A
    request waits here while aborted requests still hold the slots or blocks it needs.
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
        """Requests that were admitted but not yet submitted."""
        return len(self._waiting)

    @property
    def num_unanswered_blocks(self) -> int:
        """Blocks of requests that have no response yet: the engine may not have allocated them."""
        return sum(each.num_blocks for each in self._unanswered)

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that aborted requests may still hold."""
        return sum(each.num_blocks for each in self._leaving)

    def admit(self, submitted: SubmittedRequest) -> None:
        """Add a request to which the scheduler assigned a slot."""
        self._waiting.append(submitted)
        self._unanswered.add(submitted)

    def on_response(self, submitted: SubmittedRequest) -> None:
        """Record that the engine returned a response for the request."""
        self._unanswered.discard(submitted)

    def enter(self) -> Iterator[SubmittedRequest]:
        """Yield the requests that may enter now, in order; each counts as inside from then on."""
        while self._waiting and self._has_room(self._waiting[0]):
            submitted = self._waiting.popleft()
            self._inside.add(submitted)
            yield submitted

    def release(self, submitted: SubmittedRequest) -> bool:
        """Release a request whose slot the scheduler took back; return True when the engine must
        abort it.
        """
        self._unanswered.discard(submitted)
        if submitted in self._inside:
            self._inside.discard(submitted)
            self._leaving.add(submitted)
            return True
        if submitted in self._waiting:
            self._waiting.remove(submitted)
        return False

    def on_end(self, submitted: SubmittedRequest) -> None:
        """Record that the engine has released the request."""
        self._inside.discard(submitted)
        self._leaving.discard(submitted)

    def _has_room(self, submitted: SubmittedRequest) -> bool:
        # While no request leaves, the scheduler's account equals the engine's.
        if not self._leaving:
            return True
        if self.num_inside >= self._max_num_seqs:
            return False
        # Shared blocks count twice here, which can only delay the request until others have left.
        held = sum(each.num_blocks for each in self._inside)
        return held + self.num_leaving_blocks + submitted.num_blocks <= self._num_blocks
