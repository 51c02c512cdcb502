"""Rejects requests that do not fit into the engine's queue, without a query to the engine.

The front (gRPC server process) estimates the queue from the state that the engine published most
recently, and from the requests that this front has submitted or withdrawn since. The engine has the
requests of all fronts and checks again (`penstock.scheduler.admission_control`). A wrong estimate
can therefore make a rejection one step late or early, but cannot violate the limit of the queue.

If the queue is full, a request is accepted if it could displace another request in the engine by
the rules of `penstock.scheduler.displacement`. The front estimates this from its own requests. One
of these conditions must hold: the tenant has fewer waiting requests than another tenant, relative
to their weights; the tenant has a waiting request of lower priority; or the tenant has so few
waiting requests that only the engine can decide.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.server.front.errors import ErrorReason, Failure, RequestError, invalid_field
from penstock.server.front.live_request import LiveRequest
from penstock.server.ipc.board import BoardView
from penstock.server.ipc.frames import EngineHello

_MIN_COMMON_SPACE = 8
"""If the queue has space for fewer requests per front than this, a front uses only its share of the
space, because all fronts see the same free space."""
_NUM_UNSEEN_STEPS = 2
"""Number of iterations of the engine's loop until the published state includes a submitted request.
The engine reads the request in the iteration after it was sent, and publishes its queue at the end
of that iteration."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Numbers of requests and prompt tokens that were sent to the engine when its loop had counted
    `num_heartbeats` heartbeats. They are negative for withdrawn requests."""

    num_heartbeats: int
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _TenantLoad:
    """The waiting requests of one tenant: their number (one per output) and lowest priority."""

    num_requests: int
    lowest_priority: int


class AdmissionEstimate:
    """The engine's queue as estimated by this front: its number of requests and of prompt tokens.

    `board` is the engine's status board, in which it publishes its queue; without a board every
    request is accepted. `num_fronts` is the number of fronts that share the engine. When the queue
    has space for few more requests, each front uses only its share of the space; otherwise all
    fronts would submit a request for the last free place, and the engine would reject all but
    one.
    `waiting` iterates over the live requests of this front; only their queued outputs are counted.
    `weight_of` returns the weight of a tenant.
    """

    def __init__(
        self,
        board: BoardView | None = None,
        num_fronts: int = 1,
        *,
        waiting: Iterable[LiveRequest] = (),
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self._board = board
        self._num_fronts = num_fronts
        self._waiting = waiting
        self._weight_of = weight_of
        # The waiting requests of this front by tenant, computed at `_queues_heartbeat`.
        self._queues: dict[str, _TenantLoad] = {}
        self._queues_heartbeat = -1
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
        not fit into the queue.

        Each output counts as one request. Raises RequestError (INVALID_ARGUMENT) for more outputs
        than the queue can hold. Accepts everything if `hello`, the first frame of the engine, is
        None. `num_tokens` is the total number of tokens of the prompts, 0 while it is unknown. As
        in the engine, a prompt longer than the limit of tokens is accepted while the queue is
        empty.
        """
        if self._board is None or hello is None:
            return
        most = hello.max_num_waiting
        if num_requests > most:
            raise invalid_field(
                "sampling.num_outputs",
                f"{num_requests} outputs exceed the queue's limit of {most}",
            )
        self._forget_seen(self._board.num_heartbeats)
        queue = self._board.queue
        if queue.epoch != hello.epoch:
            return  # The state is that of another engine, or the engine has not run a step yet.
        num_waiting = queue.num_waiting + self._num_requests
        if num_waiting <= 0:
            return
        num_waiting_tokens = queue.num_waiting_tokens + self._num_tokens
        space = self._share_of(most - queue.num_waiting, most)
        if (
            self._num_requests + num_requests <= space
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
        """Return True if the engine may have waiting requests that this tenant's `num_requests`
        requests could displace. If so, counts them as waiting until the engine's next step."""
        num_heartbeats = 0 if self._board is None else self._board.num_heartbeats
        if num_heartbeats != self._queues_heartbeat:
            # Compute this at most once per step: in an overload, a rejection must cost less than a
            # request.
            self._queues_heartbeat, self._queues = num_heartbeats, _queues_of(self._waiting)
        own = self._queues.get(tenant)
        if own is not None and own.lowest_priority < priority:
            return True
        num_own = num_requests + (0 if own is None else own.num_requests)
        share = num_own / self._weight_of(tenant)
        # The largest share may belong to requests of another front, so the engine decides about
        # small shares.
        num_tenants = len(self._queues) + (own is None)
        num_fair = max_num_waiting // (2 * self._num_fronts * num_tenants)
        is_small = self._num_fronts > 1 and num_own <= num_fair
        may = is_small or any(
            (other.num_requests - 1) / self._weight_of(name) >= share
            for name, other in self._queues.items()
            if name != tenant
        )
        if may:
            # Include requests that were sent before the engine's next step.
            lowest = priority if own is None else min(priority, own.lowest_priority)
            self._queues[tenant] = _TenantLoad(num_own, lowest)
        return may

    def _share_of(self, space: int, max_num_waiting: int) -> int:
        # Do not reserve in a short queue, because no front could use the last places.
        min_common_space = _MIN_COMMON_SPACE * self._num_fronts
        return space // self._num_fronts if space < min_common_space <= max_num_waiting else space

    def note_sent(self, num_requests: int, num_tokens: int) -> None:
        """Record that requests were sent to the engine and are not in its published state yet.

        Negative numbers record the withdrawal of requests that are still in the published state.
        """
        if self._board is None:
            return
        num_heartbeats = self._board.num_heartbeats
        self._forget_seen(num_heartbeats)
        self._unseen.append(_Sent(num_heartbeats, num_requests, num_tokens))
        self._num_requests += num_requests
        self._num_tokens += num_tokens

    def _forget_seen(self, num_heartbeats: int) -> None:
        """Remove from the estimate the requests that are in the published state by now, or that
        were sent to a lost engine.

        `num_heartbeats` is the number of heartbeats of the engine's loop, one per iteration.
        """
        unseen = self._unseen
        while unseen and not 0 <= num_heartbeats - unseen[0].num_heartbeats < _NUM_UNSEEN_STEPS:
            seen = unseen.popleft()
            self._num_requests -= seen.num_requests
            self._num_tokens -= seen.num_tokens


def _queues_of(requests: Iterable[LiveRequest]) -> dict[str, _TenantLoad]:
    queues: dict[str, _TenantLoad] = {}
    for request in requests:
        num_queued = request.num_queued
        if not num_queued:
            continue
        priority = request.generation.urgency.priority
        queue = queues.get(request.tenant)
        if queue is None:
            queues[request.tenant] = _TenantLoad(num_queued, priority)
        else:
            queue.num_requests += num_queued
            queue.lowest_priority = min(queue.lowest_priority, priority)
    return queues
