"""The interface for observers of an engine's requests and steps, and the component that calls them.

Defines `EngineListener`; a recorder implements it. `StepWatch` keeps the data of a step between its
launch and its result. Without a listener there is no `StepWatch` and no cost. With a listener the
cost per step does not depend on the number of decode rows: their context is summed again only when
the set of decoding slots changes.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedStep, PrefillChunk
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.running import RunningSet
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue


class StepNote(NamedTuple):
    """Record of a step whose result was applied. Times are seconds on the engine's clock.

    The time that an executor spends in `launch` counts as execution time. The fields from
    `num_running` on are as of the time when the result was applied.

    Attributes:
        begun_s: When planning began.
        launched_s: When planning ended and the step was passed to the executor.
        collected_s: When the result arrived.
        updated_s: When the result was applied.
        num_prefill_tokens, num_context_tokens: As in `CostModel.step_time_s`.
        predicted_s: The predicted duration of the step, NaN without a prediction.
        waits_for: Why the next request in the queue was not admitted to the step; None if no
            request was waiting or all were admitted.
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
    """Receives events of the engine. Called on the engine's thread: must return quickly and must
    not raise.
    """

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Called when a request is submitted, before it is admitted to the queue or rejected;
        `specs`: one per output, in order.
        """
        ...

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        """Called before a step is passed to the executor; `chunks`: its prefill rows, in order."""
        ...

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        """Called at the end of an iteration of the engine loop with its events.

        `note`: the record of the step whose result they contain; None if there was no result, or if
        the step had no rows. With a self-paced executor (see `ExecutorInfo`) each iteration is one
        step.
        """
        ...


_Launch = tuple[Batch, float, float, int, int, float, WaitReason | None]
"""The first fields of a `StepNote`, in order: those known at launch."""


class StepWatch:
    """Reports each step of one engine to its listener; times are seconds on the engine's clock."""

    def __init__(
        self,
        listener: EngineListener,
        *,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        waits: WaitClock,
        sizing: StepSizing,
    ) -> None:
        self._listener = listener
        self._cache = cache
        self._running = running
        self._queue = queue
        self._waits = waits
        self._sizing = sizing
        self._launches: deque[_Launch] = deque()
        self._note: StepNote | None = None
        # The decode roster of the previous step (identified by its `ones` column), and its context
        # tokens.
        self._ones: object = None
        self._num_decode_context = 0

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Notify the listener that a request is submitted."""
        self._listener.note_submit(specs)

    def launch(self, step: LaunchedStep, begun_s: float, launched_s: float) -> None:
        """Record a step that is about to be launched, and notify the listener."""
        batch, chunks = step.batch, step.chunks
        num_context = self._num_context_of_decodes(step)
        num_prefill = 0
        for chunk in chunks:
            num_prefill += chunk.count
            num_context += chunk.start + chunk.count
        sizing, predicted_s = self._sizing, math.nan
        if sizing.has_cost:
            predicted_s = sizing.fit.step_time_s(
                num_prefill_tokens=num_prefill,
                num_decodes=batch.num_decodes,
                num_context_tokens=num_context,
            )
        reason = self._waits.reason
        self._launches.append(
            (batch, begun_s, launched_s, num_prefill, num_context, predicted_s, reason)
        )
        self._listener.note_launch(batch, chunks, launched_s)

    def collected(self, collected_s: float, updated_s: float) -> None:
        """Record that the result of the oldest launched step was applied; `iteration_ended` reports
        it.
        """
        launch = self._launches.popleft()
        if not len(launch[0].slots):
            return
        queue, cache = self._queue, self._cache
        num_cached = cache.pool.num_cached
        self._note = StepNote(
            *launch,
            collected_s,
            updated_s,
            len(self._running),
            len(queue),
            queue.num_tokens,
            cache.pool.num_used,
            num_cached,
            cache.pool.num_available - num_cached,
        )

    def iteration_ended(self, events: StepEvents) -> None:
        """Pass the events of an iteration of the engine loop, and the record of the step that was
        collected in it (if any), to the listener.
        """
        note, self._note = self._note, None
        self._listener.note_iteration(events, note)

    def _num_context_of_decodes(self, step: LaunchedStep) -> int:
        """Return the sum of the positions of the decode rows at the end of the step."""
        batch, ones = step.batch, step.ones
        num_decodes = batch.num_decodes
        if ones is None or ones is not self._ones:
            starts = batch.starts[:num_decodes]
            self._num_decode_context = int(np.add.reduce(starts))
            self._ones = ones
        # The same rows have each advanced by one token.
        self._num_decode_context += num_decodes
        return self._num_decode_context
