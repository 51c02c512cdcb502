"""Manages the running requests, their slots, and the statistics of each residency (from an
admission to the preemption or end).

Tracks the free slots, the request in each slot, which slots decode and which are in prefill, and
the decode rows of the next step (built again only when membership changes). Statistics are updated
only at events of a request, so their cost per step does not grow with the number of running
requests.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import Residency
from penstock.scheduler.launched_step import PrefillChunk, SamplingRows, gather_rows
from penstock.scheduler.request import Request
from penstock.scheduler.slot_arrays import SlotArrays

_NOT_DECODING = -1
_MAX_SIZE = np.iinfo(np.int32).max


class _SlotStatistics:
    """The statistics of one slot: its prefill rows, how many of them repeat a step that sampled
    nothing, and its decode steps.

    `is_again`: the next prefill row is such a repetition.
    """

    __slots__ = (
        "decoding_since",
        "is_again",
        "num_decodes",
        "num_prefills",
        "num_repeats",
        "sizes",
    )

    def __init__(self) -> None:
        self.num_prefills = 0
        self.num_repeats = 0
        self.is_again = False
        self.num_decodes = 0
        self.decoding_since = _NOT_DECODING
        # Minimum and maximum batch size, set after the last step of the slot.
        self.sizes: tuple[int, int] | None = None


class Residencies:
    """The statistics of all slots. `num_steps`: number of steps so far, also the index of the next
    step.
    """

    def __init__(self, num_slots: int) -> None:
        self._accounts = [_SlotStatistics() for _ in range(num_slots)]
        self._size = 0
        # Minimum and maximum batch size since each slot was taken; undefined for a free slot.
        self._least: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._greatest: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._has_new = False
        self.num_steps = 0

    def note_step(self, size: int, chunks: Sequence[PrefillChunk]) -> None:
        """Record that a step is planned; `size`: its number of rows; `chunks`: its prefill rows."""
        # A step without rows does not count.
        if size and (size != self._size or self._has_new):
            self._size, self._has_new = size, False
            np.minimum(self._least, size, out=self._least)
            np.maximum(self._greatest, size, out=self._greatest)
        self.num_steps += 1
        for chunk in chunks:
            account = self._accounts[chunk.slot]
            account.num_prefills += 1
            if account.is_again:
                account.num_repeats += 1
                account.is_again = False

    def begin(self, slot: int) -> None:
        """Record that a request got a slot, and runs from the next step on."""
        self._accounts[slot] = _SlotStatistics()
        self._least[slot], self._greatest[slot] = _MAX_SIZE, 0
        self._has_new = True

    def start_decoding(self, slot: int) -> None:
        """Record that the slot decodes, one token per step, from the next step on."""
        self._accounts[slot].decoding_since = self.num_steps

    def return_to_prefill(self, slot: int) -> None:
        """Record that the last step sampled nothing for the slot, so that its row is planned again,
        as prefill.
        """
        account = self._accounts[slot]
        account.is_again = True
        self._stop_decoding(account)

    def pause_decoding(self, slot: int) -> None:
        """Record that the slot is left out of the next step and decodes again later."""
        self._stop_decoding(self._accounts[slot])

    def stop_decoding(self, slot: int) -> None:
        """Record that the last step of the slot was launched."""
        account = self._accounts[slot]
        self._stop_decoding(account)
        account.sizes = self._sizes(slot)

    def end(self, slot: int) -> Residency:
        """Record that the slot is released; return the statistics of the residency."""
        account = self._accounts[slot]
        self._stop_decoding(account)
        num_steps = account.num_prefills + account.num_decodes
        if not num_steps:
            return Residency()
        least, greatest = account.sizes or self._sizes(slot)
        return Residency(account.num_prefills - account.num_repeats, num_steps, least, greatest)

    def _stop_decoding(self, account: _SlotStatistics) -> None:
        if account.decoding_since != _NOT_DECODING:
            account.num_decodes += self.num_steps - account.decoding_since
            account.decoding_since = _NOT_DECODING

    def _sizes(self, slot: int) -> tuple[int, int]:
        return int(self._least[slot]), int(self._greatest[slot])


@dataclass(slots=True, eq=False)
class DecodeRoster:
    """The slots that compute one token each in a step, as decode rows.

    `starts` int32 [m]: position of the token that each slot computes next; `capacity` int32 [m]:
    tokens that fit into its blocks; `ones` int32 [high_water, see `RunningSet`]: 1 for slots in the
    roster, else 0, so that one array addition advances all of them.
    """

    rows: SamplingRows
    starts: NDArray[np.int32]
    capacity: NDArray[np.int32]
    ones: NDArray[np.int32]


class RunningSet:
    """The running requests and their slots. The lowest free slot is taken first, so that
    `high_water`, one more than the highest slot in use, stays low.

    `is_behind`: an executor returned several tokens for a slot, so the block tables must be
    extended when the next step is planned.
    """

    def __init__(self, arrays: SlotArrays) -> None:
        self._arrays = arrays
        self._request_of: list[Request | None] = [None] * arrays.num_slots
        self._free = list(range(arrays.num_slots))
        self._is_decoding: NDArray[np.bool_] = np.zeros(arrays.num_slots, dtype=np.bool_)
        self._prefilling: dict[int, Request] = {}
        self._paused: set[int] = set()
        self._roster: DecodeRoster | None = None
        self._num_stop_columns = 0
        self.high_water = 0
        self.is_behind = False
        self._admitted: list[Request] = []
        self._released: list[int] = []
        self._residencies = Residencies(arrays.num_slots)

    def __len__(self) -> int:
        return len(self._request_of) - len(self._free)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._request_of if request is not None)

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def request_at(self, slot: int) -> Request | None:
        """Return the request in a slot, None if the slot is free."""
        return self._request_of[slot]

    def take_slot(self, request: Request) -> int:
        """Give a request the lowest free slot; return the slot. The request starts in prefill."""
        slot = heapq.heappop(self._free)
        self._request_of[slot] = request
        self._prefilling[slot] = request
        self._admitted.append(request)
        self._num_stop_columns = max(self._num_stop_columns, len(request.spec.stop_ids))
        self.high_water = max(self.high_water, slot + 1)
        self._residencies.begin(slot)
        return slot

    def release_slot(self, slot: int) -> Residency:
        """Release a slot; return the statistics of the residency."""
        self._request_of[slot] = None
        self._prefilling.pop(slot, None)
        self._is_decoding[slot] = False
        self._paused.discard(slot)
        self._roster = None
        heapq.heappush(self._free, slot)
        self._released.append(slot)
        while self.high_water and self._request_of[self.high_water - 1] is None:
            self.high_water -= 1
        if not self.high_water:
            self._num_stop_columns = 0
        return self._residencies.end(slot)

    @property
    def has_released(self) -> bool:
        """Whether the executor must be notified of released slots."""
        return bool(self._released)

    def take_changes(self) -> tuple[tuple[Request, ...], tuple[int, ...]]:
        """Return the requests that got a slot, and the slots that were released, since the last
        call.
        """
        changes = tuple(self._admitted), tuple(self._released)
        self._admitted.clear()
        self._released.clear()
        return changes

    def note_step(self, chunks: Sequence[PrefillChunk], num_decodes: int) -> None:
        """Record that a step with these rows is planned."""
        self._residencies.note_step(num_decodes + len(chunks), chunks)

    def start_decoding(self, slot: int) -> None:
        """Move a slot from prefill to decode: its tokens so far are all computed or in flight."""
        del self._prefilling[slot]
        self._is_decoding[slot] = True
        self._residencies.start_decoding(slot)
        self._roster = None

    def return_to_prefill(self, slots: list[int]) -> None:
        """Move these slots from decode back to prefill, because they sampled nothing."""
        for slot in slots:
            request = self._request_of[slot]
            if request is not None:
                self._prefilling[slot] = request
                self._residencies.return_to_prefill(slot)
        self._is_decoding[slots] = False
        self._roster = None

    def stop_decoding(self, slots: NDArray[np.intp]) -> None:
        """Record that these slots need no more steps: a launched step ends them."""
        for slot in slots.tolist():
            self._residencies.stop_decoding(slot)
        self._is_decoding[slots] = False
        self._roster = None

    @property
    def num_paused(self) -> int:
        """Number of decodes that are left out of the step being planned."""
        return len(self._paused)

    def pause_decoding(self, slots: NDArray[np.intp]) -> None:
        """Leave these decoding slots out of steps until `resume_decoding`."""
        for slot in slots.tolist():
            self._residencies.pause_decoding(slot)
            self._paused.add(slot)
        self._is_decoding[slots] = False
        self._roster = None

    def resume_decoding(self) -> None:
        """Include the paused decodes in steps again, from the next step on."""
        for slot in self._paused:
            self._residencies.start_decoding(slot)
            self._is_decoding[slot] = True
            self._roster = None
        self._paused.clear()

    def prefilling(self) -> list[Request]:
        """Return the requests in prefill, the most senior first (see `Request.seniority`)."""
        if len(self._prefilling) < 2:
            return list(self._prefilling.values())
        return sorted(self._prefilling.values(), key=lambda request: request.seniority)

    def prefilling_by_level(self) -> list[Request]:
        """Return the requests in prefill by their class at admission, the highest first, then in
        the order in which they entered prefill.
        """
        if len(self._prefilling) < 2:
            return list(self._prefilling.values())
        levels = self._arrays.level
        return sorted(self._prefilling.values(), key=lambda request: -int(levels[request.slot]))

    @property
    def num_prefilling(self) -> int:
        """The number of requests with tokens to compute before they decode."""
        return len(self._prefilling)

    def most_junior(self) -> Request:
        """Return the request that arrived last among the running requests of the lowest class;
        raise ValueError if none runs.
        """
        return max(self, key=lambda request: request.seniority)

    def decodes(self, capacity: NDArray[np.int32]) -> DecodeRoster:
        """Return the decode rows of the next step; `capacity` int32 [S] as in KVCache."""
        if self._roster is None:
            arrays = self._arrays
            is_decoding = self._is_decoding[: self.high_water]
            index = is_decoding.nonzero()[0]
            self._roster = DecodeRoster(
                rows=gather_rows(arrays, index, self._num_stop_columns),
                starts=arrays.num_computed[index],
                capacity=capacity[index],
                ones=is_decoding.astype(np.int32),
            )
        return self._roster

    def rows_of(self, slots: NDArray[np.intp]) -> SamplingRows:
        """Return the `SamplingRows` of these slots, intp [m], in this order."""
        return gather_rows(self._arrays, slots, self._num_stop_columns)

    def discard_roster(self) -> None:
        """Discard the cached `DecodeRoster`, because the number of computed tokens was changed
        outside a step.
        """
        self._roster = None
