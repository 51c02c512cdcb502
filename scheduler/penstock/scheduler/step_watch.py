"""Reports every step and every turn to a listener.

Owns what must be remembered of a step between its launch and its result. Without a listener there
is no watch and no cost; with one the cost is a few numbers, not rows: decode rows are added up
again only when they differ from the step before.
"""

import math
from collections import deque

import numpy as np

from penstock.scheduler.batch import Batch
from penstock.scheduler.engine_listener import EngineListener
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.flight import Flight
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_note import StepNote

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
        """See `EngineListener.note_submit`."""
        self._listener.note_submit(specs)

    def launch(self, flight: Flight, begun_s: float, launched_s: float) -> None:
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

    def _num_context_of_decodes(self, flight: Flight) -> int:
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
