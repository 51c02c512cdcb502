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
    """Whose rows were in a batch, up to which position, and which of them prefilled."""

    ends: dict[int, int]
    prefilled: frozenset[int]


class BudgetedExecutor(SimulatedExecutor):
    """A strict device that also holds the scheduler to its token budget.

    `rows`: of every batch, which was in it.
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
    """What a client was reported about one output.

    `was_alone`: no client else lived when it was submitted. `is_trial`: it was let in to see what a
    step takes. `num_queued`: how often it was stated that its request is in the queue. `level`: its
    class when it was last admitted. `waits_since_s`: when it began to wait; `num_passed_by`: how
    often one that came later was let in since; `first_launch`: batches launched before it was let
    in. `is_refusable`: it had not been let into the queue when its engine was last asked for news.
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
        """Smaller is more senior under FCFS."""
        return (-self.spec.priority, self.sequence)

    @property
    def line(self) -> tuple[int, str]:
        """Under the fair order those of one class and tenant stand in one line."""
        return (self.spec.priority, self.spec.tenant)

    @property
    def expiry_s(self) -> float:
        """When time ends it as things stand."""
        spec = self.spec
        ttft_s = NO_TIME if self.tokens else spec.ttft_deadline_s
        return min(spec.deadline_s, spec.time_limit_s, ttft_s)


@dataclass(slots=True, kw_only=True)
class Game:
    """One engine and all that was ever stated to and by it.

    `told`: the last life of each key; `history`: all lives. `knows_prices`: the engine was given
    the very prices of its device.
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
        """Who lives and does not run."""
        return (told for told in self.live.values() if not told.is_running)


# Watches who is let in and who is passed, in place of an engine's order.

MAX_PASSED_OF_ONE_LINE = 4


@dataclass(slots=True)
class _Wait:
    """Since when a head that lacked blocks stood there, and how many passed it."""

    since_s: float
    num_overtaken: int = 0


class OrderWitness:
    """An `QueueOrder` that checks what batch_admission.py promises of the one behind it.

    In a round, from the first that lacks blocks (the head) to its end: at most `max_lookahead`
    are passed over, four of a line; whom a preemption threw out is not passed; and over all rounds
    at most `max_num_overtakes` pass one head, none later than `max_overtake_s` after it first was
    found blocked.
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
        """Who goes next; the time is that of the round."""
        self._now = now
        return self._order.peek(now)

    def pass_over(self, request: Request) -> None:
        """A client does not fit, and those behind are tried."""
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
        """A client is let in, past the head of this round if there is one; whether by age."""
        self._waits.pop(request.ticket, None)
        if self._passed:
            wait = self._waits[self._passed[0].ticket]
            wait.num_overtaken += 1
            self.num_passes += 1
            assert wait.num_overtaken <= self._config.max_num_overtakes
            assert self._now - wait.since_s <= self._config.max_overtake_s
        return self._order.note_admission(request)

    def end_round(self) -> None:
        """The round is over."""
        self._passed.clear()
        self._order.end_round()
