"""The listener of an engine's steps, and what it is called with.

Owns the interface between an engine and a recorder of it, and what must be remembered of a step
between its launch and its result. Does not know what is recorded. Without a listener there is no
cost; with one the cost is a few numbers, not rows: decode rows are added up again only when they
differ from the step before.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.launched_step import Chunk, LaunchedStep
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.scheduler import Scheduler


class StepNote(NamedTuple):
    """A step with rows whose result is in. Times are seconds on the engine's clock.

    `begun_s`: planning began; `launched_s`: planning ended, and the executor got the step;
    `collected_s`: its result had arrived; `updated_s`: and was applied. So what an executor
    computes before `launch` returns is its own time. `num_prefill_tokens` and `num_context_tokens`
    as in `CostModel`. `predicted_s`: the predicted duration of the step, NaN without a prediction.
    `waits_for`: what the next in line lacked when it was planned, None when none waited or all were
    admitted. The counts after it are of the moment when the result was applied.
    """

    batch: Batch
    begun_s: float
    launched_s: float
    num_prefill_tokens: int
    num_context_tokens: int
    predicted_s: float
    waits_for: WaitReason | None
    collected_s: float
    updated_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


class EngineListener(Protocol):
    """Called on the engine's thread, in every turn: it must be quick, and must not raise."""

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """These are about to be queued: the outputs of one request, leader first."""
        ...

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """The executor is about to get a step; `chunks`: its rows of prefill, in their order."""
        ...

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """A turn has ended with these events; `note`: of the step whose result is in them.

        A step without rows has none, and for a self-paced executor a turn is one step.
        """
        ...


_Launch = tuple[Batch, float, float, int, int, float, WaitReason | None]
"""A note's first fields, in its order."""


class StepWatch:
    """Makes the notes of one engine's steps; times are seconds on its clock."""

    def __init__(self, scheduler: Scheduler, listener: EngineListener) -> None:
        self._scheduler = scheduler
        self._listener = listener
        self._launches: deque[_Launch] = deque()
        self._note: StepNote | None = None
        # The decode rows of the step before, by the column of its members, and their context at its
        # end.
        self._ones: object = None
        self._num_decode_context = 0

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """These are about to be queued."""
        self._listener.note_submit(specs)

    def launch(self, flight: LaunchedStep, begun_s: float, launched_s: float) -> None:
        """A step is about to be launched; `collected` reports its result."""
        life = self._scheduler.life
        batch, chunks = flight.batch, flight.chunks
        num_context = self._num_context_of_decodes(flight)
        num_prefill = 0
        for chunk in chunks:
            num_prefill += chunk.count
            num_context += chunk.start + chunk.count
        pace, predicted_s = life.outlook.pace, math.nan
        if pace.has_prices:
            predicted_s = pace.fit.step_time_s(
                num_prefill_tokens=num_prefill,
                num_decodes=batch.num_decodes,
                num_context_tokens=num_context,
            )
        reason = life.waits.reason
        self._launches.append(
            (batch, begun_s, launched_s, num_prefill, num_context, predicted_s, reason)
        )
        self._listener.note_launch(batch, chunks, launched_s)

    def collected(self, collected_s: float, updated_s: float) -> None:
        """The result of the oldest launched step is applied."""
        launch = self._launches.popleft()
        if not len(launch[0].slots):
            return
        life = self._scheduler.life
        queue, pool = life.queue, life.cache.pool
        num_cached = pool.num_cached
        self._note = StepNote(
            *launch,
            collected_s,
            updated_s,
            len(life.running),
            len(queue),
            queue.num_tokens,
            pool.num_used,
            num_cached,
            pool.num_available - num_cached,
        )

    def turned(self, events: StepEvents) -> None:
        """A turn has ended."""
        note, self._note = self._note, None
        self._listener.note_turn(events, note)

    def _num_context_of_decodes(self, flight: LaunchedStep) -> int:
        """Sum of the positions of the decode rows at the end of the step."""
        batch, ones = flight.batch, flight.ones
        num_decodes = batch.num_decodes
        if ones is None or ones is not self._ones:
            starts = batch.starts[:num_decodes]
            self._num_decode_context = int(np.add.reduce(starts))
            self._ones = ones
        # The same rows have each advanced by one token.
        self._num_decode_context += num_decodes
        return self._num_decode_context
