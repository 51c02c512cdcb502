"""The running requests and their slots.

Owns the slots: which are free, the request in each, which of them decode and which still prefill,
and the decode rows of the next step (gathered again only when membership changes). Does not decide
anything.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.arrival_order import seniority
from penstock.scheduler.request import Request
from penstock.scheduler.rows import Rows, gather_rows
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.stays import Stays


@dataclass(slots=True, eq=False)
class DecodeRoster:
    """The slots that take one token each in a step.

    `starts` int32 [m]: position of the token each computes next; `capacity` int32 [m]: tokens that
    fit into its blocks; `ones` int32 [high_water]: 1 where a slot is in the roster, so that whole
    columns advance in one addition.
    """

    rows: Rows
    starts: NDArray[np.int32]
    capacity: NDArray[np.int32]
    ones: NDArray[np.int32]


class Running:
    """Slots and their requests; the lowest free slot is taken first to keep columns short.

    `stays`: the account of each residency; it is closed before a slot is released.
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
        self.stays = Stays(arrays.num_slots)

    def __len__(self) -> int:
        return len(self._request_of) - len(self._free)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._request_of if request is not None)

    @property
    def has_free_slot(self) -> bool:
        """Whether another request may enter."""
        return bool(self._free)

    def request_at(self, slot: int) -> Request | None:
        """The request in a slot."""
        return self._request_of[slot]

    def enter(self, request: Request) -> int:
        """Give a request the lowest free slot; it prefills first."""
        slot = heapq.heappop(self._free)
        self._request_of[slot] = request
        self._prefilling[slot] = request
        self._num_stop_columns = max(self._num_stop_columns, len(request.spec.stop_ids))
        self.high_water = max(self.high_water, slot + 1)
        self.stays.begin(slot)
        return slot

    def leave(self, slot: int) -> None:
        """Release a slot."""
        self._request_of[slot] = None
        self._prefilling.pop(slot, None)
        self._is_decoding[slot] = False
        self._paused.discard(slot)
        self._roster = None
        heapq.heappush(self._free, slot)
        while self.high_water and self._request_of[self.high_water - 1] is None:
            self.high_water -= 1
        if not self.high_water:
            self._num_stop_columns = 0

    def start_decoding(self, slot: int) -> None:
        """Every known token of this slot is computed or in flight."""
        del self._prefilling[slot]
        self._is_decoding[slot] = True
        self.stays.start_decoding(slot)
        self._roster = None

    def prefill_again(self, slots: list[int]) -> None:
        """Compute the last known token of these again, like a last chunk: they sampled nothing."""
        for slot in slots:
            request = self._request_of[slot]
            if request is not None:
                self._prefilling[slot] = request
                self.stays.prefill_again(slot)
        self._is_decoding[slots] = False
        self._roster = None

    def stop_decoding(self, slots: NDArray[np.intp]) -> None:
        """These need no more steps: a launched step ends them."""
        for slot in slots.tolist():
            self.stays.stop_decoding(slot)
        self._is_decoding[slots] = False
        self._roster = None

    @property
    def num_paused(self) -> int:
        """Decodes that are left out of the step being planned."""
        return len(self._paused)

    def pause_decoding(self, slots: NDArray[np.intp]) -> None:
        """Leave these decodes out until `resume_decoding`."""
        for slot in slots.tolist():
            self.stays.pause_decoding(slot)
            self._paused.add(slot)
        self._is_decoding[slots] = False
        self._roster = None

    def resume_decoding(self) -> None:
        """The paused decodes that still run take part in the next step."""
        for slot in self._paused:
            self.stays.start_decoding(slot)
            self._is_decoding[slot] = True
            self._roster = None
        self._paused.clear()

    def prefilling(self) -> list[Request]:
        """Requests whose tokens are not all computed, most senior first."""
        if len(self._prefilling) < 2:
            return list(self._prefilling.values())
        return sorted(self._prefilling.values(), key=seniority)

    def prefilling_by_level(self) -> list[Request]:
        """By class as it was at admission, then in order of admission."""
        if len(self._prefilling) < 2:
            return list(self._prefilling.values())
        levels = self._arrays.level
        return sorted(self._prefilling.values(), key=lambda request: -int(levels[request.slot]))

    @property
    def num_prefilling(self) -> int:
        """How many have tokens left to compute before they decode."""
        return len(self._prefilling)

    def most_junior(self) -> Request:
        """The next victim of a preemption; raises ValueError when none runs.

        Constrained outputs are spared while there are others: they may not be resumable.
        """
        return max(self, key=lambda request: (request.spec.constraint is None, seniority(request)))

    def decodes(self, capacity: NDArray[np.int32]) -> DecodeRoster:
        """The decode rows of the next step; `capacity` int32 [S] as in KVCache."""
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

    def rows_of(self, slots: NDArray[np.intp]) -> Rows:
        """Gathered rows for some slots."""
        return gather_rows(self._arrays, slots, self._num_stop_columns)

    def rewind(self) -> None:
        """Progress was changed outside a step: gather again."""
        self._roster = None
