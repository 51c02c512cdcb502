"""Records each launched step whose result is not collected yet, and the rows that it samples.

Keeps the data of a batch that `Engine.update` needs and that the slot arrays no longer contain:
which rows sample, at which positions, and which prefill chunks complete their prompts.
`SamplingRows` copies values from `SlotArrays` that are constant while a request runs. The rows of a
decode batch are copied when its membership changes and reused in every step.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.request import Request
from penstock.scheduler.slot_arrays import NO_TOKEN, SlotArrays


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The m slots that sample a token in a step.

    `slots` int32 [m] and `index` intp [m]: the same slot numbers in two types. `offsets` intp [m]:
    start of a slot's tokens in the flat token array. `stop_ids`: int32 [m] arrays, each with at
    most one stop id of every slot, NO_TOKEN where a slot has none. The number of arrays is at most
    the largest number of stop ids of a request. `max_total`, `min_total` int32 [m]: as in
    `SlotArrays`. `has_min`: whether any row has a minimum length (stop ids are banned up to it).
    `keys` int64 [m]: the requests' keys. `tenants` int32 [m]: the indices of their tenants.
    """

    slots: NDArray[np.int32]
    index: NDArray[np.intp]
    offsets: NDArray[np.intp]
    stop_ids: tuple[NDArray[np.int32], ...]
    max_total: NDArray[np.int32]
    min_total: NDArray[np.int32]
    has_min: bool
    keys: NDArray[np.int64]
    tenants: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.index)

    def take(self, keep: NDArray[np.intp]) -> "SamplingRows":
        """Return the rows at `keep`, in that order."""
        return SamplingRows(
            self.slots[keep],
            self.index[keep],
            self.offsets[keep],
            tuple(column[keep] for column in self.stop_ids),
            self.max_total[keep],
            self.min_total[keep],
            self.has_min,
            self.keys[keep],
            self.tenants[keep],
        )

    def ended(
        self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two masks, bool [m]: which rows end with these `tokens`, and which of them by a
        stop id.

        `tokens` int32 [m]: the sampled tokens. `num_tokens` int32 [m]: the lengths of prompt and
        output, with these tokens.
        """
        is_stop: NDArray[np.bool_] = np.zeros(len(tokens), dtype=np.bool_)
        for column in self.stop_ids:
            is_stop |= tokens == column
        if self.has_min:
            is_stop &= num_tokens > self.min_total
        return is_stop | (num_tokens >= self.max_total), is_stop


def gather_rows(arrays: SlotArrays, index: NDArray[np.intp], num_stop_columns: int) -> SamplingRows:
    """Return the rows for the slots of `index`; `num_stop_columns`: at least the number of stop ids
    of each of their requests.
    """
    columns = arrays.stop_ids[:num_stop_columns, index]
    max_total = arrays.max_total[index]
    min_total = arrays.min_total[index]
    return SamplingRows(
        slots=index.astype(np.int32),
        index=index,
        offsets=index * arrays.max_seq_len,
        stop_ids=tuple(column for column in columns if np.count_nonzero(column != NO_TOKEN)),
        max_total=max_total,
        min_total=min_total,
        has_min=bool(np.count_nonzero(min_total > arrays.num_prompt[index])),
        keys=arrays.key[index],
        tenants=arrays.tenant[index],
    )


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """A prefill row: `count` tokens of `request` from position `start` on.

    `completes`: the chunk ends with the last token that the request has so far, so the row samples
    the next one.
    """

    request: Request
    slot: int
    start: int
    count: int
    completes: bool


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A launched batch, with the data that `Results.apply` needs for its result.

    Attributes:
        rows: The m slots that sample.
        positions: int32 [m]; position of the token that each slot samples.
        ones: int32 [high_water]; see `running.DecodeRoster`. None if the rows are not exactly the
            rows of a decode roster.
        chunks: The prefill rows, including rows that do not sample.
        dropped: Slots released since the launch.
    """

    batch: Batch
    rows: SamplingRows
    positions: NDArray[np.int32]
    ones: NDArray[np.int32] | None
    chunks: tuple[PrefillChunk, ...]
    dropped: set[int] = field(default_factory=set[int])


class LaunchedSteps:
    """Launched steps whose results have not been collected yet, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> LaunchedStep:
        """The oldest launched step; its result is collected next. There must be a launched step."""
        return self._steps[0]

    @property
    def newest(self) -> LaunchedStep:
        """The step that was planned last; there must be at least one."""
        return self._steps[-1]

    def append(self, step: LaunchedStep) -> None:
        """Append a step that is being launched."""
        self._steps.append(step)

    def pop_oldest(self) -> LaunchedStep:
        """Remove and return the oldest step. Call it when the step's result has arrived."""
        return self._steps.popleft()

    def drop(self, slot: int, num_computed: int) -> int:
        """Record in every step that a slot is released, so that the tokens that these steps return
        for it are dropped.

        Return how many of its `num_computed` tokens were computed by collected steps.
        """
        for step in self._steps:
            # A row that is already dropped belongs to an earlier request in the same slot.
            if slot not in step.dropped:
                starts = step.batch.starts[step.batch.slots == slot]
                num_computed = min([num_computed, *starts.tolist()])
                step.dropped.add(slot)
        return num_computed
