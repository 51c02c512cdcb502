"""Builders of batches and filled slots, for tests of executors without a scheduler."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.scheduler.batch import Batch
from penstock.scheduler.request import Request, RequestSpec
from penstock.scheduler.slot_arrays import SlotArrays


def batch_of(arrays: SlotArrays, rows: Sequence[tuple[int, int, int]], **changes: Any) -> Batch:
    """Return a batch in which every row is sampled. `rows`: (slot, start position, number of
    tokens) of each row, decodes first. `changes`: fields of Batch that differ.
    """
    columns = np.array(rows, dtype=np.int32).reshape(-1, 3)
    slots, starts, num_tokens = (np.ascontiguousarray(column) for column in columns.T)
    fields = {
        "step": 1,
        "num_decodes": sum(count == 1 and start > 0 for _, start, count in rows),
        "sampled_slots": slots,
        **changes,
    }
    return Batch(arrays=arrays, slots=slots, starts=starts, num_tokens=num_tokens, **fields)


def fill_slot(arrays: SlotArrays, spec: RequestSpec, slot: int) -> Request:
    """Fill row `slot` of `arrays` with a request that has no output yet; return the request."""
    request = Request(
        spec=spec, sequence=spec.key, tokens=spec.prompt_ids, block_hashes=[], slot=slot
    )
    arrays.fill(request)
    return request
