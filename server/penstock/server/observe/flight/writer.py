"""Writes the flight record of an engine, on the engine's thread.

An iteration is one run of the engine's step function. It may return the result of a step. The
writer keeps the state of live requests between events. Per step it packs one row and copies the
column of token counts of the slot arrays (one entry per batch slot). Python code runs per event
(admission, chunk, first token, end), never per running request. The writer does not read the
content of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.server.observe.flight.layout import NO_REASON, TOTALS, EventKind, FlightFacts
from penstock.server.observe.flight.memory import (
    EVENT_RING,
    REQUEST_RING,
    STEP_RING,
    RingMemory,
)
from penstock.server.tenants import client_request_id


class IterationGaps:
    """Measures the inter-token latency of a self-paced engine: its executor schedules its own
    batches. `num_slots` is the number of its batch slots."""

    def __init__(self, num_slots: int) -> None:
        self._last_s: NDArray[np.float64] = np.full(num_slots, nan)
        self._begun: list[int] = []

    def begin(self, slot: int) -> None:
        """Record that a new request has occupied the slot in this iteration."""
        if slot >= 0:
            self._last_s[slot] = nan
            self._begun.append(slot)

    def measure(
        self, arrays: SlotArrays | None, known: NDArray[np.int32], now: float
    ) -> tuple[float, int]:
        """Return the mean time between the tokens of this iteration and the previous tokens in the
        same slots, in seconds, and the number of slots in the mean. Without slots the mean is NaN.

        `known`, an int32 array of shape [num_slots], has the number of tokens of each slot after
        the previous iteration. `now` is the time of this iteration's result in seconds; it is
        stored for the slots that got tokens. `arrays` is None before the first launch.
        """
        if arrays is None:
            return nan, 0
        has_more = arrays.num_tokens > known
        # The count of this slot was that of another request; the first token comes in a later
        # iteration.
        has_more[self._begun] = False
        gaps = now - self._last_s[has_more]
        gaps = gaps[~np.isnan(gaps)]
        self._last_s[has_more] = now
        return (float(gaps.mean()), len(gaps)) if len(gaps) else (nan, 0)

    def end_iteration(self) -> None:
        """Clear the set of slots that got a new request in this iteration."""
        self._begun.clear()


_PROMPT, _CACHED, _OUTPUT, _ADMITTED, _PREEMPTED, _FINISHED, _FAILED = range(3, len(TOTALS))
_MAX_U4, _MAX_U2 = 2**32 - 1, 2**16 - 1
_MAX_PRIORITY = 2**31 - 1
_NOTHING: Sequence[int] = (0, 0, 0, 0)
# Plain integers, because looking up the members of an enumeration is much slower.
_QUEUED, _ADMIT, _CHUNK, _FIRST_TOKEN, _PREEMPT, _FINISH, _FAIL, _FOUND = map(int, EventKind)


@dataclass(slots=True, eq=False)
class _Live:
    """A live output of a request.

    `num_output` is the number of tokens that it had generated when it last lost its slot.
    `iteration` is the number of the iteration in which it was last admitted, -1 before. `has_token`
    is True if it has generated a token.
    """

    num_prompt: int
    num_output: int = 0
    num_cached: int = 0
    slot: int = -1
    iteration: int = -1
    has_token: bool = False


class FlightWriter:
    """Writes the flight record to the memory of descriptor `fd`. The descriptor may be closed
    afterwards.

    The methods of this `EngineListener` may raise exceptions; `EngineListeners` handles them. The
    constructor raises FlightError or OSError if the memory cannot be used.
    """

    def __init__(self, fd: int, facts: FlightFacts) -> None:
        self._memory = memory = RingMemory(fd, facts)
        self._totals = memory.totals
        self._append_step = memory.appender(STEP_RING)
        self._append_events = memory.batch_appender(EVENT_RING)
        # The fields of events that are not yet written to the memory, as a flat list.
        self._events: list[object] = []
        self._append_request = memory.appender(REQUEST_RING)
        self._write_launch = memory.launch_writer()
        self._live: dict[int, _Live] = {}
        # The keys of the outputs of a request by its first key, until it is queued or rejected.
        self._outputs: dict[int, tuple[int, ...]] = {}
        # The slots granted in this iteration, by key; the keys without a token since admission; and
        # for a self-paced executor, the keys of prompts whose first chunk was recorded.
        self._granted: dict[int, int] = {}
        self._awaiting: set[int] = set()
        self._prefilling: set[int] = set()
        self._is_self_paced = facts.is_self_paced
        # The decodes skipped in the latest steps, and the duration of those steps.
        self._num_paused, self._paused_s = 0, 0.0
        self._gaps = IterationGaps(facts.max_num_seqs) if facts.is_self_paced else None
        self._arrays: SlotArrays | None = None
        # The number of known tokens of each slot after the previous iteration.
        self._known: NDArray[np.int32] = np.zeros(facts.max_num_seqs, dtype=np.int32)
        self._iteration = 0
        self._step = 0
        self._collected_s = nan
        # The rows and tokens of prefill that a step computes for the first time.
        self._new_prefill: dict[int, tuple[int, int]] = {}
        # Counts since the last row: admitted, preempted, finished, failed.
        self._uncounted = _NOTHING

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Write a row for each output of a submitted request."""
        for spec in specs:
            self._live[spec.key] = _Live(spec.num_prompt_tokens)
            self._append_request(
                spec.key,
                spec.arrival_s,
                spec.ttft_deadline_s,
                spec.deadline_s,
                min(spec.num_prompt_tokens, _MAX_U4),
                min(spec.max_tokens, _MAX_U4),
                max(-_MAX_PRIORITY, min(spec.priority, _MAX_PRIORITY)),
                min(spec.output_index, _MAX_U2),
                spec.trace_id,
                client_request_id(spec.tenant, spec.request_id).encode("utf-8", "replace"),
                spec.tenant.encode("utf-8", "replace"),
            )
        if len(specs) > 1:
            self._outputs[specs[0].key] = tuple(spec.key for spec in specs)

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        """Record the step that is about to be launched, and the events of its prefill chunks."""
        self._arrays = batch.arrays
        for request in batch.admitted:
            self._granted[request.spec.key] = request.slot
        if chunks:
            num_new, num_tokens = self._note_chunks(batch.step, chunks, launched_s)
            self._write_events()
            self._new_prefill[batch.step] = (num_new, num_tokens)
            self._write_launch(batch.step, launched_s, batch.num_decodes, num_new, num_tokens)
        elif batch.num_decodes:
            self._write_launch(batch.step, launched_s, batch.num_decodes, 0, 0)

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        """Write the events of an iteration, and the row of the step that ended in it, if any."""
        if note is not None:
            self._step = note.batch.step
        if events.changes:
            self._note_changes(events)
        num_first, num_tokens = 0, len(events.keys)
        if num_tokens:
            if self._awaiting:
                num_first = self._note_first_tokens(events, note)
            self._totals[_OUTPUT] += num_tokens
        if events.ends:
            self._note_ends(events)
        if self._events:
            self._write_events()
        if note is not None:
            self._write_step(note, num_tokens, num_first)
        if self._arrays is not None:
            self._known[:] = self._arrays.num_tokens
        if self._gaps is not None:
            self._gaps.end_iteration()
        self._iteration += 1

    def close(self) -> None:
        """Unmap the memory; the written content stays. Idempotent."""
        self._memory.close()

    def _write_events(self) -> None:
        self._append_events(self._events)
        self._events.clear()

    def _event(self, kind: int, key: int, at_s: float, slot: int, count: int) -> None:
        count = count if count < _MAX_U4 else _MAX_U4
        self._events += (at_s, self._step, key, slot, count, kind, NO_REASON)

    def _note_chunks(
        self, step: int, chunks: Sequence[PrefillChunk], launched_s: float
    ) -> tuple[int, int]:
        """Record the chunks, or with a self-paced executor only the first chunk of each prompt.
        Return the number of recorded chunks and the number of their tokens."""
        num_new = num_tokens = 0
        for chunk in chunks:
            key, count = chunk.request.spec.key, chunk.count
            if self._is_self_paced:
                # Until its first token, every step contains the prompt.
                if key in self._prefilling:
                    continue
                self._prefilling.add(key)
            self._events += (launched_s, step, key, chunk.slot, count, _CHUNK, NO_REASON)
            num_new += 1
            num_tokens += count
        return num_new, num_tokens

    def _note_changes(self, events: StepEvents) -> None:
        for change in events.changes:
            if isinstance(change, Queued):
                for key in self._outputs.pop(change.key, (change.key,)):
                    self._event(_QUEUED, key, change.at_s, -1, change.num_ahead)
            elif isinstance(change, Admitted):
                self._note_admitted(change)
            elif isinstance(change, Preempted):
                self._note_preempted(change.key, change.at_s, events.keys)
            else:
                self._note_found(change)
        self._granted.clear()

    def _note_found(self, found: PrefixFound) -> None:
        live = self._live.get(found.key)
        slot = -1
        if live is not None:
            live.num_cached, slot = found.num_cached_tokens, live.slot
        self._event(_FOUND, found.key, found.at_s, slot, found.num_cached_tokens)

    def _note_admitted(self, change: Admitted) -> None:
        key, num_cached = change.key, change.num_cached_tokens
        slot = self._granted.get(key, -1)
        self._event(_ADMIT, key, change.at_s, slot, num_cached)
        self._count(0)
        self._totals[_ADMITTED] += 1
        live = self._live.get(key)
        if live is not None:
            live.slot, live.iteration = slot, self._iteration
            if not live.has_token:
                live.num_cached = num_cached
            self._awaiting.add(key)
            if self._gaps is not None:
                self._gaps.begin(slot)

    def _note_preempted(self, key: int, at_s: float, keys: NDArray[np.int64]) -> None:
        live = self._live.get(key)
        slot, num_output = -1, 0
        if live is not None:
            live.num_output = num_output = self._num_output(key, live, keys)
            slot, live.slot = live.slot, -1
        self._event(_PREEMPT, key, at_s, slot, num_output)
        self._awaiting.discard(key)
        self._prefilling.discard(key)
        self._count(1)
        self._totals[_PREEMPTED] += 1

    def _note_first_tokens(self, events: StepEvents, note: StepNote | None) -> int:
        """Record the first tokens since admission. Return the number of requests that got one."""
        first = self._first_of(events.keys, note)
        if not first:
            return 0
        at_s = events.at_s if note is None else note.collected_s
        self._awaiting -= first
        self._prefilling -= first
        totals = self._totals
        for key in first:
            live = self._live[key]
            self._event(_FIRST_TOKEN, key, at_s, live.slot, 0)
            if not live.has_token:
                live.has_token = True
                totals[_PROMPT] += live.num_prompt
                totals[_CACHED] += min(live.num_cached, live.num_prompt)
        return len(first)

    def _first_of(self, keys: NDArray[np.int64], note: StepNote | None) -> set[int]:
        """Return the keys that got their first token since admission in this iteration."""
        if note is not None and not self._is_self_paced:
            # Only a completed prompt gives a first token. Its row is after the decode rows, unless
            # rows were dropped or the results are in another order.
            num_completed = len(note.batch.sampled_slots) - note.batch.num_decodes
            if not num_completed:
                return set()
            first = self._awaiting.intersection(keys[-num_completed:].tolist())
            if len(first) == num_completed:
                return first
        return self._awaiting.intersection(keys.tolist())

    def _note_ends(self, events: StepEvents) -> None:
        for end in events.ends:
            self._outputs.pop(end.key, None)
            self._awaiting.discard(end.key)
            self._prefilling.discard(end.key)
            live = self._live.pop(end.key, None)
            slot, num_output = -1, 0
            if live is not None:
                slot, num_output = live.slot, self._num_output(end.key, live, events.keys)
            is_failure = isinstance(end, Failed)
            kind = _FAIL if is_failure else _FINISH
            count = num_output if num_output < _MAX_U4 else _MAX_U4
            self._events += (end.at_s, self._step, end.key, slot, count, kind, end.reason)
            self._count(3 if is_failure else 2)
            self._totals[_FAILED if is_failure else _FINISHED] += 1

    def _num_output(self, key: int, live: _Live, keys: NDArray[np.int64]) -> int:
        """Return the number of tokens that a request has generated, including the tokens of this
        iteration (`keys`).

        A request whose slot has been released is no longer in the slot arrays. Therefore the number
        is the total after the previous iteration plus the tokens of this one.
        """
        if live.slot < 0:
            return live.num_output
        num_before = live.num_output
        if live.iteration != self._iteration:
            num_before = int(self._known[live.slot]) - live.num_prompt
        return num_before + int(np.count_nonzero(keys == key))

    def _write_step(self, note: StepNote, num_tokens: int, num_first: int) -> None:
        (
            batch, begun_s, launched_s, num_prefill, num_context, predicted_s, waits_for,
            collected_s, updated_s, num_running, num_waiting, num_waiting_tokens,
            num_used, num_cached, num_free,
        ) = note  # fmt: skip
        num_decodes = batch.num_decodes
        num_rows = len(batch.slots) - num_decodes
        if num_rows:
            num_rows, num_prefill = self._new_prefill.pop(batch.step, (0, 0))
        if self._gaps is None:
            num_itl = min(num_tokens - num_first, num_decodes)
            itl_s = self._mean_gap_s(batch, collected_s, num_itl)
        else:
            itl_s, num_itl = self._gaps.measure(self._arrays, self._known, collected_s)
        self._collected_s = collected_s
        self._append_step(
            batch.step,
            begun_s,
            launched_s,
            collected_s,
            updated_s,
            itl_s,
            predicted_s,
            num_itl if num_itl > 0 else 0,
            num_prefill,
            num_rows,
            num_decodes,
            num_context,
            num_tokens,
            num_running,
            num_waiting,
            num_waiting_tokens if num_waiting_tokens < _MAX_U4 else _MAX_U4,
            num_used,
            num_cached,
            num_free,
            *self._uncounted,
            waits_for or NO_REASON,
        )
        self._uncounted = _NOTHING

    def _mean_gap_s(self, batch: Batch, collected_s: float, num_itl: int) -> float:
        """Return the mean time between the tokens of a step's decodes and their previous tokens, in
        seconds; NaN if no decode got a token.

        The previous token of a decode is from the previous step, unless the decode was paused.
        Steps skip a paused decode; the step that resumes it adds the time of the skipped steps.
        """
        step_s = collected_s - self._collected_s
        gap_s = step_s if num_itl > 0 else nan
        if batch.num_paused:
            self._num_paused = batch.num_paused
            self._paused_s += step_s
        elif self._num_paused:
            num_resumed = min(self._num_paused, max(num_itl, 0))
            if num_itl > 0:
                gap_s += self._paused_s * num_resumed / num_itl
            self._num_paused, self._paused_s = 0, 0.0
        return gap_s

    def _count(self, place: int) -> None:
        """Add 1 to the count at index `place` of `_uncounted`. The next step row includes these
        counts."""
        uncounted = list(self._uncounted)
        uncounted[place] = min(uncounted[place] + 1, _MAX_U2)
        self._uncounted = uncounted
