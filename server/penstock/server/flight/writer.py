"""Writes the flight record of an engine, on the engine's thread, at next to no cost.

Owns what is remembered of live requests between events. Per step it packs one row and copies one
column of the slot arrays; Python runs per event (admission, chunk, first token, end), never per
running request. Nothing of what a request says is looked at.
"""

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import NO_SLOTS, Batch
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_note import StepNote
from penstock.server.flight.facts import FlightFacts
from penstock.server.flight.gaps import TurnGaps
from penstock.server.flight.layout import NO_REASON, TOTALS, EventKind
from penstock.server.flight.ring_memory import EVENT_RING, REQUEST_RING, RingMemory

_PROMPT, _CACHED, _OUTPUT, _ADMITTED, _PREEMPTED, _FINISHED, _FAILED = range(3, len(TOTALS))
_MAX_U4, _MAX_U2 = 2**32 - 1, 2**16 - 1
_MAX_PRIORITY = 2**31 - 1
_NOTHING = [0, 0, 0, 0]


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended. `num_output`: as of when it last lost its slot.

    `turn`: when it was last admitted. `has_token`: ever.
    """

    num_prompt: int
    num_output: int = 0
    num_cached: int = 0
    slot: int = -1
    turn: int = -1
    has_token: bool = False


class FlightWriter:
    """Makes the memory of `fd` its own and writes to it. Raises FlightError, OSError at first.

    For each turn of the engine: `note_launch` and `note_step` while it runs, `note_turn` after it.
    """

    def __init__(self, fd: int, facts: FlightFacts) -> None:
        self._memory = RingMemory(fd, facts)
        self._append_step = self._memory.step_packer()
        self._live: dict[int, _Live] = {}
        # Keys of the outputs of a request, by that of the first, until it is queued or refused.
        self._outputs: dict[int, tuple[int, ...]] = {}
        # Slots granted in this turn; who has had no token in its stay; whose chunks are under way.
        self._granted: dict[int, int] = {}
        self._awaiting: set[int] = set()
        self._prefilling: set[int] = set()
        self._is_self_paced = facts.is_self_paced
        self._gaps = TurnGaps(facts.max_num_seqs) if facts.is_self_paced else None
        self._arrays: SlotArrays | None = None
        # Known tokens of each slot after the turn before.
        self._known: NDArray[np.int32] = np.zeros(facts.max_num_seqs, dtype=np.int32)
        self._note: StepNote | None = None
        self._turn = 0
        self._step = 0
        self._collected_s = nan
        # Rows and tokens of prefill that a step computes for the first time.
        self._new_prefill: dict[int, tuple[int, int]] = {}
        # Counts that no row has told yet: admitted, preempted, finished, failed.
        self._untold = _NOTHING
        self._rows = NO_SLOTS
        self._num_context_tokens = 0

    def note_requests(self, specs: tuple[RequestSpec, ...]) -> None:
        """These are about to be submitted: the outputs of one request, leader first."""
        for spec in specs:
            self._live[spec.key] = _Live(spec.num_prompt_tokens)
            self._memory.append(
                REQUEST_RING,
                spec.key,
                spec.arrival_s,
                spec.ttft_deadline_s,
                spec.deadline_s,
                min(spec.num_prompt_tokens, _MAX_U4),
                min(spec.max_tokens, _MAX_U4),
                max(-_MAX_PRIORITY, min(spec.priority, _MAX_PRIORITY)),
                min(spec.output_index, _MAX_U2),
                spec.trace_id,
                spec.request_id.encode("utf-8", "replace"),
                spec.tenant.encode("utf-8", "replace"),
            )
        if len(specs) > 1:
            self._outputs[specs[0].key] = tuple(spec.key for spec in specs)

    def note_launch(self, batch: Batch, now: float) -> None:
        """The executor is about to get a step."""
        self._arrays = arrays = batch.arrays
        for request in batch.admitted:
            self._granted[request.spec.key] = request.slot
        num_decodes = batch.num_decodes
        num_rows = num_tokens = 0
        if len(batch.slots) > num_decodes:
            slots, counts = batch.slots[num_decodes:], batch.num_tokens[num_decodes:].tolist()
            keys: list[int] = arrays.key[slots].tolist()
            for key, slot, count in zip(keys, slots.tolist(), counts, strict=True):
                if self._note_chunk(batch.step, key, slot, count, now):
                    num_rows += 1
                    num_tokens += count
            self._new_prefill[batch.step] = (num_rows, num_tokens)
        if len(batch.slots):
            self._memory.note_launch(batch.step, now, num_decodes, num_rows, num_tokens)

    def note_step(self, note: StepNote) -> None:
        """A result is in; written with the news of the same turn."""
        self._note = note

    def note_turn(self, events: StepEvents) -> None:
        """A turn is over, and this is its news."""
        note, self._note = self._note, None
        if note is not None:
            self._step = note.batch.step
        if events.changes:
            self._note_changes(events)
        num_first = 0
        num_tokens = len(events.keys)
        if num_tokens and self._awaiting:
            num_first = self._note_first_tokens(events, note)
        if events.ends:
            self._note_ends(events)
        if num_tokens:
            self._memory.totals[_OUTPUT] += num_tokens
        if note is not None:
            self._write_step(note, num_tokens, num_first)
        if self._arrays is not None:
            self._known[:] = self._arrays.num_tokens
        if self._gaps is not None:
            self._gaps.end_turn()
        self._turn += 1

    def close(self) -> None:
        """Let go of the memory; what was written stays. Idempotent."""
        self._memory.close()

    def _event(
        self, kind: EventKind, key: int, at_s: float, *, slot: int = -1, count: int = 0
    ) -> None:
        count = min(count, _MAX_U4)
        self._memory.append(EVENT_RING, at_s, self._step, key, slot, count, kind, NO_REASON)

    def _note_chunk(self, step: int, key: int, slot: int, count: int, now: float) -> bool:
        """Whether it is new."""
        if self._is_self_paced:
            # A prompt stands in every step until it is answered.
            if key in self._prefilling:
                return False
            self._prefilling.add(key)
        kind = EventKind.CHUNK
        self._memory.append(EVENT_RING, now, step, key, slot, count, kind, NO_REASON)
        return True

    def _note_changes(self, events: StepEvents) -> None:
        for change in events.changes:
            match change:
                case Queued(key=key, at_s=at_s, num_ahead=num_ahead):
                    for output in self._outputs.pop(key, (key,)):
                        self._event(EventKind.QUEUED, output, at_s, count=num_ahead)
                case Admitted():
                    self._note_admitted(change)
                case Preempted(key=key, at_s=at_s):
                    self._note_preempted(key, at_s, events.keys)
                case PrefixFound(key=key, at_s=at_s, num_cached_tokens=num_cached):
                    live = self._live.get(key)
                    slot = -1
                    if live is not None:
                        live.num_cached, slot = num_cached, live.slot
                    self._event(EventKind.PREFIX_FOUND, key, at_s, slot=slot, count=num_cached)
        self._granted.clear()

    def _note_admitted(self, change: Admitted) -> None:
        key, num_cached = change.key, change.num_cached_tokens
        slot = self._granted.get(key, -1)
        self._event(EventKind.ADMITTED, key, change.at_s, slot=slot, count=num_cached)
        self._tell(0)
        self._memory.totals[_ADMITTED] += 1
        live = self._live.get(key)
        if live is not None:
            live.slot, live.turn = slot, self._turn
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
        self._event(EventKind.PREEMPTED, key, at_s, slot=slot, count=num_output)
        self._awaiting.discard(key)
        self._prefilling.discard(key)
        self._tell(1)
        self._memory.totals[_PREEMPTED] += 1

    def _note_first_tokens(self, events: StepEvents, note: StepNote | None) -> int:
        """How many had their first token of a stay."""
        first = self._awaiting.intersection(events.keys.tolist())
        if not first:
            return 0
        at_s = events.at_s if note is None else note.collected_s
        self._awaiting -= first
        self._prefilling -= first
        totals = self._memory.totals
        for key in first:
            live = self._live[key]
            self._event(EventKind.FIRST_TOKEN, key, at_s, slot=live.slot)
            if not live.has_token:
                live.has_token = True
                totals[_PROMPT] += live.num_prompt
                totals[_CACHED] += min(live.num_cached, live.num_prompt)
        return len(first)

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
            kind = EventKind.FAILED if is_failure else EventKind.FINISHED
            count, reason = min(num_output, _MAX_U4), end.reason
            self._memory.append(
                EVENT_RING, end.at_s, self._step, end.key, slot, count, kind, reason
            )
            self._tell(3 if is_failure else 2)
            self._memory.totals[_FAILED if is_failure else _FINISHED] += 1

    def _num_output(self, key: int, live: _Live, keys: NDArray[np.int64]) -> int:
        """Tokens a request has generated, those of this turn (`keys`) among them.

        The slot arrays forget a request when it gives its slot back: what they said after the turn
        before and what came in this one add up to it.
        """
        if live.slot < 0:
            return live.num_output
        num_before = live.num_output
        if live.turn != self._turn:
            num_before = int(self._known[live.slot]) - live.num_prompt
        return num_before + int(np.count_nonzero(keys == key))

    def _write_step(self, note: StepNote, num_tokens: int, num_first: int) -> None:
        batch = note.batch
        num_decodes = batch.num_decodes
        num_rows = num_prefill = 0
        if len(batch.slots) > num_decodes:
            num_rows, num_prefill = self._new_prefill.pop(batch.step, (0, 0))
        if self._gaps is None:
            num_itl = min(num_tokens - num_first, num_decodes)
            itl_s = note.collected_s - self._collected_s if num_itl > 0 else nan
        else:
            itl_s, num_itl = self._gaps.measure(self._arrays, self._known, note.collected_s)
        self._collected_s = note.collected_s
        untold, self._untold = self._untold, _NOTHING
        self._append_step(
            batch.step,
            note.begun_s,
            note.launched_s,
            note.collected_s,
            note.updated_s,
            itl_s,
            note.predicted_s,
            num_itl if num_itl > 0 else 0,
            num_prefill,
            num_rows,
            num_decodes,
            self._num_context(batch),
            num_tokens,
            note.num_running,
            note.num_waiting,
            min(note.num_waiting_tokens, _MAX_U4),
            note.num_used_blocks,
            note.num_cached_blocks,
            note.num_free_blocks,
            *(untold if untold is _NOTHING else [min(num, _MAX_U2) for num in untold]),
            note.waits_for or NO_REASON,
        )

    def _num_context(self, batch: Batch) -> int:
        """Positions of all rows at the end of a step, added up."""
        if batch.slots is self._rows:
            # The same rows once more, each a token further: nothing to add up.
            self._num_context_tokens += len(batch.slots)
        else:
            self._num_context_tokens = int(np.add.reduce(batch.starts + batch.num_tokens))
            # Rows with chunks among them are made anew for every step.
            self._rows = batch.slots
        return self._num_context_tokens

    def _tell(self, place: int) -> None:
        """Count something for the next row."""
        if self._untold is _NOTHING:
            self._untold = [0, 0, 0, 0]
        self._untold[place] += 1
