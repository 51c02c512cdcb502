"""Reports every step and every iteration to a listener.

Owns the data of a step that is kept between its launch and its result. Without a listener there is
no watch and no cost; with one, a step costs a few numbers, not rows: decode rows are summed again
only when they differ from those of the previous step.
"""

import math
from collections import deque

import numpy as np

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedStep
from penstock.scheduler.listener import EngineListener, StepNote
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.running import RunningSet
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.waiting_queue import WaitingQueue

_Launch = tuple[Batch, float, float, int, int, float, WaitReason | None]
"""A note's first fields, in its order."""


class StepWatch:
    """Reports each step of one engine to its listener; times are seconds on the engine's clock."""

    def __init__(
        self,
        listener: EngineListener,
        *,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        sizing: StepSizing,
    ) -> None:
        self._listener = listener
        self._cache = cache
        self._running = running
        self._queue = queue
        self._sizing = sizing
        self._launches: deque[_Launch] = deque()
        self._note: StepNote | None = None
        # The decode rows of the previous step, by the column of its members, and their context at
        # its end.
        self._ones: object = None
        self._num_decode_context = 0

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `EngineListener.note_submit`."""
        self._listener.note_submit(specs)

    def launch(self, step: LaunchedStep, begun_s: float, launched_s: float) -> None:
        """Record a step that is about to be launched; `collected` reports its result."""
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
        reason = self._queue.reason
        self._launches.append(
            (batch, begun_s, launched_s, num_prefill, num_context, predicted_s, reason)
        )
        self._listener.note_launch(batch, chunks, launched_s)

    def collected(self, collected_s: float, updated_s: float) -> None:
        """Record that the result of the oldest launched step is applied."""
        launch = self._launches.popleft()
        if not len(launch[0].slots):
            return
        queue, cache = self._queue, self._cache
        num_cached = cache.num_cached
        self._note = StepNote(
            *launch,
            collected_s,
            updated_s,
            len(self._running),
            len(queue),
            queue.num_tokens,
            cache.num_used,
            num_cached,
            cache.num_available - num_cached,
        )

    def turned(self, events: StepEvents) -> None:
        """Report that an iteration of the engine loop has ended."""
        note, self._note = self._note, None
        self._listener.note_turn(events, note)

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
