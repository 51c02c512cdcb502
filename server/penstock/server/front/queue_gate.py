"""Rejects at once what the engine's queue has no room for, without asking the engine.

Owns the front's estimate of the queue: what the engine showed of it last, and what this front has
sent or taken back since. The engine decides: it knows the queue of all fronts, and rejects what
passes here. So an estimate that is a little off costs a rejection a step later, or one a step too
early, never the bound.

At a full queue a request passes if it could displace another in the engine (the rules of
`penstock.scheduler.queue_places`), judged by the requests of this front: its tenant has fewer of
them waiting than another, or some of a lower class, or so few that only other fronts can tell.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.server.front.errors import ErrorReason, Refusal, RequestError, refuse_field
from penstock.server.front.live_request import LiveRequest
from penstock.server.link.board import QueueState
from penstock.server.link.ports import EngineHello

_CLOSE = 8
"""So few free places for each front are shared out: the others see the same ones."""
_NUM_UNSEEN_TURNS = 2
"""What was sent during a turn is taken in by the next, and shown at that one's end."""


class EngineStatus(Protocol):
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


@dataclass(slots=True)
class _Part:
    """Requests of one tenant that wait, and the lowest of their priorities."""

    num_requests: int
    lowest: int


class QueueGate:
    """The queue as estimated by this front.

    `show` None, for engines that show nothing: then everything passes. `num_fronts` share one
    engine: where few places are left, each takes its part of them, so that they do not all send a
    request for the same one, which the engine would reject a step later. `waiting`: the live
    requests of this front. `weight_of`: a tenant's weight.
    """

    def __init__(
        self,
        show: EngineStatus | None = None,
        num_fronts: int = 1,
        *,
        waiting: Iterable[LiveRequest] = (),
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self._show = show
        self._num_fronts = num_fronts
        self._waiting = waiting
        self._weight_of = weight_of
        # By tenant, as of that turn of the engine.
        self._parts: dict[str, _Part] = {}
        self._parts_turn = -1
        self._unseen: deque[_Sent] = deque()
        self._num_requests = 0
        self._num_tokens = 0
        self.num_refused = 0

    def check(
        self,
        hello: EngineHello | None,
        num_requests: int,
        num_tokens: int = 0,
        *,
        tenant: str = "",
        priority: int = 0,
    ) -> None:
        """Raise RequestError (QUEUE_FULL) when so many more of a tenant and class do not fit.

        INVALID_ARGUMENT for more outputs than the queue has places. `num_tokens`: of their prompts,
        0 while that is not known. As in the engine, prompts that are more than the bound of tokens
        by themselves pass while nothing waits.
        """
        if self._show is None or hello is None:
            return
        most = hello.max_num_waiting
        if num_requests > most:
            raise refuse_field("sampling.num_outputs", f"is more than the queue has places, {most}")
        self._forget_seen(self._show.num_beats)
        queue = self._show.queue
        if queue.epoch != hello.epoch:
            return  # another engine's, or one's that has not taken a turn
        num_waiting = queue.num_waiting + self._num_requests
        if num_waiting <= 0:
            return
        num_waiting_tokens = queue.num_waiting_tokens + self._num_tokens
        room = self._share_of(most - queue.num_waiting, most)
        if (
            self._num_requests + num_requests <= room
            and num_waiting_tokens + num_tokens <= hello.max_num_waiting_tokens
        ):
            return
        if self._may_displace(tenant, priority, num_requests, most):
            return
        self.num_refused += 1
        # Not before the queue is through: whoever is refused here would find it full again.
        queue_s = queue.estimated_queue_s
        raise RequestError(Refusal(reason=ErrorReason.QUEUE_FULL, retry_after_s=queue_s or None))

    def _may_displace(
        self, tenant: str, priority: int, num_requests: int, max_num_waiting: int
    ) -> bool:
        """Whether the engine may have a request that gives way to so many of this tenant."""
        turn = 0 if self._show is None else self._show.num_beats
        if turn != self._parts_turn:
            # Once a turn at most: a flood is rejected for less than its requests cost otherwise.
            self._parts_turn, self._parts = turn, _parts_of(self._waiting)
        own = self._parts.get(tenant)
        if own is not None and own.lowest < priority:
            return True
        num_own = num_requests + (0 if own is None else own.num_requests)
        part = num_own / self._weight_of(tenant)
        # The largest part may wait at another front: then the engine decides about a small one.
        num_tenants = len(self._parts) + (own is None)
        num_fair = max_num_waiting // (2 * self._num_fronts * num_tenants)
        is_small = self._num_fronts > 1 and num_own <= num_fair
        may = is_small or any(
            (other.num_requests - 1) / self._weight_of(name) >= part
            for name, other in self._parts.items()
            if name != tenant
        )
        if may:
            # Those that follow before the engine's next turn come on top of it.
            self._parts[tenant] = _Part(num_own, min(priority, own.lowest if own else priority))
        return may

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


def _parts_of(requests: Iterable[LiveRequest]) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for request in requests:
        num_queued = request.num_queued
        if not num_queued:
            continue
        priority = request.generation.urgency.priority
        part = parts.get(request.tenant)
        if part is None:
            parts[request.tenant] = _Part(num_queued, priority)
        else:
            part.num_requests += num_queued
            part.lowest = min(part.lowest, priority)
    return parts
