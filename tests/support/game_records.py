"""The events that a game's clients received, and the order in which the engine admitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import SimulatedConfig
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.pace import VirtualClock
from penstock.scheduler.batch import Batch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed, Finished
from penstock.scheduler.queue_order import QueueOrder
from penstock.scheduler.request import NO_TIME, FinishReason, Request, RequestSpec

# What a game against the engine writes down: batches, and what each client was reported.


@dataclass(frozen=True, slots=True)
class Launched:
    """The requests with rows in a batch, up to which position, and which of them prefilled."""

    ends: dict[int, int]
    prefilled: frozenset[int]


class BudgetedExecutor(SimulatedExecutor):
    """A strict device that also holds the scheduler to its token budget.

    `rows`: the requests in each batch.
    """

    max_num_batched_tokens = 0
    log: list[tuple[tuple[int, int, int], ...]]
    rows: list[Launched]

    def launch(self, batch: Batch) -> None:
        assert batch.num_rows or batch.released
        assert int(batch.num_tokens.sum()) <= self.max_num_batched_tokens
        rows = zip(
            batch.slots.tolist(), batch.starts.tolist(), batch.num_tokens.tolist(), strict=True
        )
        self.log.append(tuple(rows))
        keys = batch.arrays.key[batch.slots].tolist()
        ends = (batch.starts + batch.num_tokens).tolist()
        is_end_of = dict(zip(keys, ends, strict=True))
        self.rows.append(Launched(is_end_of, frozenset(keys[batch.num_decodes :])))
        super().launch(batch)


@dataclass(slots=True)
class Told:
    """The events that a client received about one output.

    `was_alone`: no other request was live when it was submitted. `is_trial`: it was admitted to
    measure the duration of a step. `num_queued`: how often its request was reported queued.
    `level`: its class when it was last admitted. `waits_since_s`: when it began to wait;
    `num_passed_by`: how often a later one was admitted since; `first_launch`: batches launched
    before it was admitted. `is_refusable`: it had not entered the queue when its engine last
    returned events.
    """

    spec: RequestSpec
    reference: NDArray[np.int32]
    sequence: int
    was_alone: bool = False
    is_trial: bool = False
    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None
    is_running: bool = False
    num_queued: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    level: int = 0
    cancelled_as: FinishReason | None = None
    waits_since_s: float = 0.0
    num_passed_by: int = 0
    first_launch: int = 0
    is_refusable: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.spec.priority, self.sequence)

    @property
    def line(self) -> tuple[int, str]:
        """Return its queue in the fair order: one for each class and tenant."""
        return (self.spec.priority, self.spec.tenant)

    @property
    def expiry_s(self) -> float:
        """Return when its earliest deadline or time limit ends it."""
        spec = self.spec
        ttft_s = NO_TIME if self.tokens else spec.ttft_deadline_s
        return min(spec.deadline_s, spec.time_limit_s, ttft_s)


@dataclass(slots=True, kw_only=True)
class Game:
    """One engine and everything that was sent to it and received from it.

    `told`: the last run of each key; `history`: all runs. `knows_prices`: the engine was given the
    exact prices of its device.
    """

    engine: Engine
    executor: BudgetedExecutor
    clock: VirtualClock
    config: SchedulerConfig
    simulated: SimulatedConfig
    witness: OrderWitness | None
    knows_prices: bool
    told: dict[int, Told] = field(default_factory=dict)
    history: list[Told] = field(default_factory=list)
    # Who lives, as far as clients know; a few of the many there were.
    live: dict[int, Told] = field(default_factory=dict)

    # The most that sessions ever held.
    num_held_blocks: int = 0

    def waiting(self) -> Iterator[Told]:
        """Return the live requests that do not run."""
        return (told for told in self.live.values() if not told.is_running)


# Watches admissions and overtaking, in place of an engine's order.

MAX_PASSED_OF_ONE_LINE = 4


@dataclass(slots=True)
class _Wait:
    """Since when the head of the queue lacked blocks, and how many requests passed it."""

    since_s: float
    num_overtaken: int = 0


class OrderWitness:
    """A `QueueOrder` that checks what batch_admission.py promises of the one behind it.

    In a round, from the first request that lacks blocks (the head) to its end: at most
    `max_lookahead` requests are passed over, four of each class and tenant; a preempted request is
    not passed; and over all rounds at most `max_num_overtakes` requests pass one head, none later
    than `max_overtake_s` after it was first found blocked.
    """

    def __init__(self, order: QueueOrder, config: SchedulerConfig) -> None:
        self._order = order
        self._config = config
        self._now = 0.0
        self._passed: list[Request] = []
        self._waits: dict[int, _Wait] = {}
        self.num_passes = 0

    def __len__(self) -> int:
        return len(self._order)

    def push(self, request: Request) -> None:
        self._order.push(request)

    def discard(self, request: Request) -> None:
        self._waits.pop(request.ticket, None)
        self._order.discard(request)

    def release(self, tenant: int) -> None:
        self._order.release(tenant)

    def peek_in_turn(self, now: float) -> Request | None:
        return self._order.peek_in_turn(now)

    def eldest_beside(self, request: Request) -> Request | None:
        return self._order.eldest_beside(request)

    def first(self, max_num: int) -> list[Request]:
        return self._order.first(max_num)

    def peek(self, now: float) -> Request | None:
        """Return the next request; the time is that of the round."""
        self._now = now
        return self._order.peek(now)

    def pass_over(self, request: Request) -> None:
        """Record that a request does not fit, and that those behind it are tried."""
        assert self._config.max_lookahead
        assert not request.num_preemptions, "whom a preemption threw out is not passed"
        self._passed.append(request)
        assert len(self._passed) <= self._config.max_lookahead
        line = [(one.spec.priority, one.tenant) for one in self._passed]
        assert line.count(line[-1]) <= MAX_PASSED_OF_ONE_LINE
        if len(self._passed) == 1:
            self._waits.setdefault(request.ticket, _Wait(self._now))
        self._order.pass_over(request)

    def note_admission(self, request: Request) -> bool:
        """Record an admission, past the head of this round if there is one; by age or not."""
        self._waits.pop(request.ticket, None)
        if self._passed:
            wait = self._waits[self._passed[0].ticket]
            wait.num_overtaken += 1
            self.num_passes += 1
            assert wait.num_overtaken <= self._config.max_num_overtakes
            assert self._now - wait.since_s <= self._config.max_overtake_s
        return self._order.note_admission(request)

    def end_round(self) -> None:
        self._passed.clear()
        self._order.end_round()
