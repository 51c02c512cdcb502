"""Refuses requests that do not fit the engine's queue, without a query to the engine.

Owns the front's estimate of the queue: the state that the engine published last, and what this
front has sent or withdrawn since. The engine decides: it knows the requests of all fronts, and
refuses what passes here wrongly. So a slightly wrong estimate only makes a refusal a step late or
early, and never breaks the bound.

If the queue is full, a request passes if it could displace another in the engine (the rules of
`penstock.scheduler.displacement`), judged by the requests of this front: its tenant has fewer
waiting requests than another tenant, or some of a lower class, or so few that only the engine can
decide.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.server.front.errors import ErrorReason, Refusal, RequestError, refuse_field
from penstock.server.front.live_request import LiveRequest
from penstock.server.link.board import BoardView
from penstock.server.link.frames import EngineHello

_CLOSE = 8
"""With at most this many free places per front, fronts share them, since the others see the same
places.
"""
_NUM_UNSEEN_TURNS = 2
"""The next step reads what is sent during a step, and publishes it at its end."""


@dataclass(frozen=True, slots=True)
class _Sent:
    turn: int
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Part:
    """Waiting requests of one tenant, and the lowest of their priorities."""

    num_requests: int
    lowest: int


class QueueGate:
    """The queue as estimated by this front.

    `show` None, for engines without a board: everything passes. `num_fronts` share one engine: when
    few places are left, each uses its share of them. Otherwise all would send a request for the
    same place, and the engine would refuse it a step later. `waiting`: the live requests of this
    front. `weight_of`: returns a tenant's weight.
    """

    def __init__(
        self,
        show: BoardView | None = None,
        num_fronts: int = 1,
        *,
        waiting: Iterable[LiveRequest] = (),
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self._show = show
        self._num_fronts = num_fronts
        self._waiting = waiting
        self._weight_of = weight_of
        # By tenant, as of iteration `_parts_turn` of the engine.
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
        """Raise RequestError (QUEUE_FULL) if `num_requests` of a tenant and class do not fit.

        INVALID_ARGUMENT for more outputs than the queue has places. `num_tokens`: of their prompts,
        0 while unknown. As in the engine, prompts that alone exceed the bound of tokens pass while
        nothing waits.
        """
        if self._show is None or hello is None:
            return
        most = hello.max_num_waiting
        if num_requests > most:
            raise refuse_field("sampling.num_outputs", f"is more than the queue has places, {most}")
        self._forget_seen(self._show.num_beats)
        queue = self._show.queue
        if queue.epoch != hello.epoch:
            return  # of another engine, or from before an engine's first step
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
        # Retry only after the queue is processed: before that it would be full again.
        queue_s = queue.estimated_queue_s
        raise RequestError(Refusal(reason=ErrorReason.QUEUE_FULL, retry_after_s=queue_s or None))

    def _may_displace(
        self, tenant: str, priority: int, num_requests: int, max_num_waiting: int
    ) -> bool:
        """Return whether the engine may have a request that this tenant's requests displace."""
        turn = 0 if self._show is None else self._show.num_beats
        if turn != self._parts_turn:
            # At most once per step: in a flood, a refusal must be cheaper than a request.
            self._parts_turn, self._parts = turn, _parts_of(self._waiting)
        own = self._parts.get(tenant)
        if own is not None and own.lowest < priority:
            return True
        num_own = num_requests + (0 if own is None else own.num_requests)
        part = num_own / self._weight_of(tenant)
        # The largest share may wait at another front, so the engine decides about small shares.
        num_tenants = len(self._parts) + (own is None)
        num_fair = max_num_waiting // (2 * self._num_fronts * num_tenants)
        is_small = self._num_fronts > 1 and num_own <= num_fair
        may = is_small or any(
            (other.num_requests - 1) / self._weight_of(name) >= part
            for name, other in self._parts.items()
            if name != tenant
        )
        if may:
            # Requests sent before the engine's next step are counted too.
            self._parts[tenant] = _Part(num_own, min(priority, own.lowest if own else priority))
        return may

    def _share_of(self, room: int, max_num_waiting: int) -> int:
        # Not in a short queue: no front could use the last places.
        close = _CLOSE * self._num_fronts
        return room // self._num_fronts if room < close <= max_num_waiting else room

    def note_sent(self, num_requests: int, num_tokens: int) -> None:
        """Record requests that were sent to the engine and are not published yet.

        Negative: withdrawn requests that are still published.
        """
        if self._show is None:
            return
        turn = self._show.num_beats
        self._forget_seen(turn)
        self._unseen.append(_Sent(turn, num_requests, num_tokens))
        self._num_requests += num_requests
        self._num_tokens += num_tokens

    def _forget_seen(self, turn: int) -> None:
        """Drop requests that the engine has published, or that a lost engine had."""
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
