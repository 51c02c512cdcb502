"""Tracks the requests inside the engine, and decides which requests are submitted next.

Requests are submitted in the order of their admission. The scheduler considers an aborted request's
slot and blocks free immediately, but the engine releases them about an iteration later. If a
submission needs such a slot or such blocks, `BlockAccount` delays it until the engine has released
them. Does not call the engine.
"""

from collections import deque
from collections.abc import Iterator

from penstock.executor.trtllm.submitted_request import SubmittedRequest


class BlockAccount:
    """The requests admitted by the scheduler: waiting, submitted, or aborted and not yet released
    by the engine.

    `max_num_seqs` and `num_blocks`: the limits on concurrent requests and on their KV cache blocks.
    The scheduler keeps its requests within them; a request waits only while aborted requests still
    hold the slot or the blocks that it needs.
    """

    def __init__(self, *, max_num_seqs: int, num_blocks: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._waiting: deque[SubmittedRequest] = deque()
        self._in_engine: set[SubmittedRequest] = set()
        self._aborted: set[SubmittedRequest] = set()
        self._unanswered: set[SubmittedRequest] = set()

    @property
    def num_in_engine(self) -> int:
        """Number of submitted requests that the engine has not released, aborted ones included."""
        return len(self._in_engine) + len(self._aborted)

    @property
    def num_waiting(self) -> int:
        """Number of admitted requests that are not submitted yet."""
        return len(self._waiting)

    @property
    def num_unanswered_blocks(self) -> int:
        """Number of blocks of admitted requests without a response; the engine may not have
        allocated these blocks yet.
        """
        return sum(each.num_blocks for each in self._unanswered)

    @property
    def num_aborted_blocks(self) -> int:
        """Number of blocks that aborted requests may still hold in the engine."""
        return sum(each.num_blocks for each in self._aborted)

    def admit(self, submitted: SubmittedRequest) -> None:
        """Add a request to which the scheduler assigned a slot; `next_submissions` yields it once
        the engine has a slot and blocks for it.
        """
        self._waiting.append(submitted)
        self._unanswered.add(submitted)

    def on_response(self, submitted: SubmittedRequest) -> None:
        """Record that the engine returned a response for the request."""
        self._unanswered.discard(submitted)

    def next_submissions(self) -> Iterator[SubmittedRequest]:
        """Yield the requests to submit now, in order; each counts as submitted from then on."""
        while self._waiting and self._fits(self._waiting[0]):
            submitted = self._waiting.popleft()
            self._in_engine.add(submitted)
            yield submitted

    def release(self, submitted: SubmittedRequest) -> bool:
        """Remove a request whose slot the scheduler released; return True if the engine must abort
        it.
        """
        self._unanswered.discard(submitted)
        if submitted in self._in_engine:
            self._in_engine.discard(submitted)
            self._aborted.add(submitted)
            return True
        if submitted in self._waiting:
            self._waiting.remove(submitted)
        return False

    def on_end(self, submitted: SubmittedRequest) -> None:
        """Record that the engine has released the request."""
        self._in_engine.discard(submitted)
        self._aborted.discard(submitted)

    def _fits(self, submitted: SubmittedRequest) -> bool:
        # Without aborted requests, the scheduler's count equals the engine's.
        if not self._aborted:
            return True
        if self.num_in_engine >= self._max_num_seqs:
            return False
        # Shared blocks are counted several times here, which can only delay the request.
        held = sum(each.num_blocks for each in self._in_engine)
        return held + self.num_aborted_blocks + submitted.num_blocks <= self._num_blocks
