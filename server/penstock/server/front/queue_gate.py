"""Refuses at once what the engine's queue has no room for, without asking the engine.

Owns the front's guess at the queue: what the engine showed of it last, and what this front has sent
or taken back since. The engine's door stays the judge: it sees all fronts, and refuses what this
lets pass. So a guess that is a little off costs a refusal a step later, or one a step too early,
never the bound.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from penstock.server.front.errors import ErrorReason, Refusal, RequestError
from penstock.server.link.board import QueueState
from penstock.server.link.ports import EngineHello

_CLOSE = 8
"""So few free places for each front are shared out: the others see the same ones."""
_NUM_UNSEEN_TURNS = 2
"""What was sent during a turn is taken in by the next, and shown at that one's end."""


class EngineShow(Protocol):
    """What an engine shows: see `penstock.server.link.board.BoardView`."""

    @property
    def num_beats(self) -> int:
        """Turns of its loop."""
        ...

    @property
    def queue(self) -> QueueState:
        """The queue after its last turn."""
        ...


@dataclass(frozen=True, slots=True)
class _Sent:
    turn: int
    num_requests: int
    num_tokens: int


class QueueGate:
    """The queue as this front believes it to be.

    `show` None, for engines that show nothing: then everything passes. `num_fronts` share one
    engine: where few places are left, each takes its part of them, so that they do not all send
    somebody for the same one, whom the door would keep waiting for a step and then refuse.
    """

    def __init__(self, show: EngineShow | None = None, num_fronts: int = 1) -> None:
        self._show = show
        self._num_fronts = num_fronts
        self._unseen: deque[_Sent] = deque()
        self._num_requests = 0
        self._num_tokens = 0
        self.num_refused = 0

    def check(self, hello: EngineHello | None, num_requests: int, num_tokens: int = 0) -> None:
        """Raise RequestError (QUEUE_FULL) when so many more do not fit.

        `num_tokens`: of their prompts, 0 while that is not known. As at the engine's door, what is
        more than a bound by itself passes while nobody waits.
        """
        if self._show is None or hello is None:
            return
        self._forget_seen(self._show.num_beats)
        queue = self._show.queue
        if queue.epoch != hello.epoch:
            return  # another engine's, or one's that has not taken a turn
        num_waiting = queue.num_waiting + self._num_requests
        if num_waiting <= 0:
            return
        num_waiting_tokens = queue.num_waiting_tokens + self._num_tokens
        room = self._share_of(hello.max_num_waiting - queue.num_waiting, hello.max_num_waiting)
        if (
            self._num_requests + num_requests <= room
            and num_waiting_tokens + num_tokens <= hello.max_num_waiting_tokens
        ):
            return
        self.num_refused += 1
        # Not before the queue is through: whoever is refused here would find it full again.
        queue_s = queue.estimated_queue_s
        raise RequestError(Refusal(reason=ErrorReason.QUEUE_FULL, retry_after_s=queue_s or None))

    def _share_of(self, room: int, max_num_waiting: int) -> int:
        # In a queue that is short itself, nobody could have the last places then.
        close = _CLOSE * self._num_fronts
        return room // self._num_fronts if room < close <= max_num_waiting else room

    def note_sent(self, num_requests: int, num_tokens: int) -> None:
        """So many more are on their way to the engine, which does not show them yet.

        Less than none: they were taken back, and it still shows them.
        """
        if self._show is None:
            return
        turn = self._show.num_beats
        self._forget_seen(turn)
        self._unseen.append(_Sent(turn, num_requests, num_tokens))
        self._num_requests += num_requests
        self._num_tokens += num_tokens

    def _forget_seen(self, turn: int) -> None:
        """Leave out what the engine has taken in, or an engine that is gone."""
        unseen = self._unseen
        while unseen and not 0 <= turn - unseen[0].turn < _NUM_UNSEEN_TURNS:
            seen = unseen.popleft()
            self._num_requests -= seen.num_requests
            self._num_tokens -= seen.num_tokens
