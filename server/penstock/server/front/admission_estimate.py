"""Rejects requests that do not fit into the engine's queue, without a query to the engine.

The front (gRPC server process) estimates the queue from the state that the engine published most
recently, and from the requests that this front has submitted or withdrawn since. The engine, which
has the requests of all fronts, checks again (`penstock.scheduler.admission_control`). A wrong
estimate can therefore make a rejection one step late or early, but cannot violate the limit of the
queue.

If the queue is full, a request is accepted if it could displace another request in the engine by
the rules of `penstock.scheduler.displacement`. The front estimates this from its own requests: the
tenant must have fewer waiting requests than another tenant, relative to their weights, or a waiting
request of lower priority, or so few waiting requests that only the engine can decide.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.server.front.errors import ErrorReason, Failure, RequestError, invalid_field
from penstock.server.front.live_request import LiveRequest
from penstock.server.ipc.board import BoardView
from penstock.server.ipc.frames import EngineHello

_CLOSE = 8
"""If the queue has space for fewer requests per front than this, a front uses only its share of the
space, because all fronts see the same free space."""
_NUM_UNSEEN_STEPS = 2
"""Number of iterations of the engine's loop until the published state includes a submitted request.
The engine reads the request in the iteration after it was sent, and publishes its queue at the end
of that iteration."""


@dataclass(frozen=True, slots=True)
class _Sent:
    turn: int
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Part:
    """The waiting requests of one tenant: their number and the lowest priority among them."""

    num_requests: int
    lowest: int


class AdmissionEstimate:
    """The queue as estimated by this front.

    `show` is the engine's status board, in which it publishes its queue; without a board every
    request is accepted. `num_fronts` is the number of fronts that share the engine. When the queue
    has space for few more requests, each front uses only its share of the space; otherwise all
    fronts would submit a request for the same place, and the engine would reject all but one.
    `waiting` has the live requests of this front. `weight_of` returns the weight of a tenant.
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
        # By tenant, as of heartbeat `_parts_step` of the engine's loop.
        self._parts: dict[str, _Part] = {}
        self._parts_step = -1
        self._unseen: deque[_Sent] = deque()
        self._num_requests = 0
        self._num_tokens = 0
        self.num_rejected = 0

    def check(
        self,
        hello: EngineHello | None,
        num_requests: int,
        num_tokens: int = 0,
        *,
        tenant: str = "",
        priority: int = 0,
    ) -> None:
        """Raise RequestError (QUEUE_FULL) if `num_requests` requests of this tenant and priority do
        not fit.

        Each output counts as one request. Raises RequestError (INVALID_ARGUMENT) for more outputs
        than the queue can hold. Accepts everything if `hello`, the first frame of the engine, is
        None. `num_tokens` is the total number of tokens of the prompts, 0 while it is unknown. As
        in the engine, a prompt longer than the limit of tokens is accepted while the queue is
        empty.
        """
        if self._show is None or hello is None:
            return
        most = hello.max_num_waiting
        if num_requests > most:
            raise invalid_field(
                "sampling.num_outputs",
                f"{num_requests} outputs exceed the queue's limit of {most}",
            )
        self._forget_seen(self._show.num_heartbeats)
        queue = self._show.queue
        if queue.epoch != hello.epoch:
            return  # The state is that of another engine, or the engine has not run a step yet.
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
        self.num_rejected += 1
        # A retry before the queue is processed would find it full again.
        queue_s = queue.estimated_queue_s
        raise RequestError(Failure(reason=ErrorReason.QUEUE_FULL, retry_after_s=queue_s or None))

    def _may_displace(
        self, tenant: str, priority: int, num_requests: int, max_num_waiting: int
    ) -> bool:
        """Return True if the engine may have waiting requests that this tenant's requests could
        displace. If so, this tenant's requests count as waiting until the engine's next step."""
        turn = 0 if self._show is None else self._show.num_heartbeats
        if turn != self._parts_step:
            # Compute this at most once per step: in an overload, a rejection must cost less than a
            # request.
            self._parts_step, self._parts = turn, _parts_of(self._waiting)
        own = self._parts.get(tenant)
        if own is not None and own.lowest < priority:
            return True
        num_own = num_requests + (0 if own is None else own.num_requests)
        part = num_own / self._weight_of(tenant)
        # The largest share may belong to requests of another front, so the engine decides about
        # small shares.
        num_tenants = len(self._parts) + (own is None)
        num_fair = max_num_waiting // (2 * self._num_fronts * num_tenants)
        is_small = self._num_fronts > 1 and num_own <= num_fair
        may = is_small or any(
            (other.num_requests - 1) / self._weight_of(name) >= part
            for name, other in self._parts.items()
            if name != tenant
        )
        if may:
            # Include requests that were sent before the engine's next step.
            self._parts[tenant] = _Part(num_own, min(priority, own.lowest if own else priority))
        return may

    def _share_of(self, room: int, max_num_waiting: int) -> int:
        # Do not reserve in a short queue, because no front could use the last places.
        close = _CLOSE * self._num_fronts
        return room // self._num_fronts if room < close <= max_num_waiting else room

    def note_sent(self, num_requests: int, num_tokens: int) -> None:
        """Record that requests were sent to the engine and are not in its published state yet.

        A negative number means that requests were withdrawn that are still in the published state.
        """
        if self._show is None:
            return
        turn = self._show.num_heartbeats
        self._forget_seen(turn)
        self._unseen.append(_Sent(turn, num_requests, num_tokens))
        self._num_requests += num_requests
        self._num_tokens += num_tokens

    def _forget_seen(self, turn: int) -> None:
        """Remove from the estimate the requests that are in the published state by now, or that
        were sent to a lost engine.

        `turn` is the number of heartbeats of the engine's loop, one per iteration.
        """
        unseen = self._unseen
        while unseen and not 0 <= turn - unseen[0].turn < _NUM_UNSEEN_STEPS:
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
