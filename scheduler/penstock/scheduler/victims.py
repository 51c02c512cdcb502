"""Victim selection: which request is preempted when blocks run out.

Owns that choice under the fair order, in whole columns. Does not preempt.

Lowest class first, a class being the priority as it had risen by age at admission, so that a
request admitted for its age is not preempted for its priority. Requests of tenants under their
share (shares.py) are spared while there are others. Then the tenant that has had most service; then
the request that loses least: the fewest computed tokens in unshared blocks. Ties go against the
youngest. A request that is ahead in all of this only gets further ahead by running, so the last one
ends, and preemptions do not cycle.
"""

import numpy as np

from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.request import Request
from penstock.scheduler.shares import Shares


def choose_victim(life: Lifecycle, spared: set[int], shares: Shares | None = None) -> Request:
    """The running request to preempt next, none of the slots of `spared`; ValueError if there is
    none.
    """
    arrays = life.arrays
    slots = np.flatnonzero(arrays.key[: life.running.high_water])
    if spared:
        slots = slots[~np.isin(slots, np.fromiter(spared, dtype=np.intp))]
    if not len(slots):
        raise ValueError("no request is left to preempt")
    # Constrained outputs are spared while there are others: they may not be resumable.
    formless = [slot for slot in slots.tolist() if not _has_form(life, slot)]
    if formless:
        slots = np.array(formless, dtype=np.intp)
    levels = arrays.level[slots]
    slots = slots[levels == levels.min()]
    if shares is not None:
        is_light = shares.are_light(arrays.tenant[slots])
        if not is_light.all():
            slots = slots[~is_light]
    service = life.tenants.service[arrays.tenant[slots]]
    slots = slots[service == service.max()]
    if len(slots) > 1:
        losses = np.array([_loss_tokens(life, slot) for slot in slots.tolist()], dtype=np.int64)
        slots = slots[losses == losses.min()]
    candidates = (life.running.request_at(slot) for slot in slots.tolist())
    return max(
        (request for request in candidates if request is not None),
        key=lambda request: request.sequence,
    )


def _has_form(life: Lifecycle, slot: int) -> bool:
    request = life.running.request_at(slot)
    return request is not None and request.spec.constraint is not None


def _loss_tokens(life: Lifecycle, slot: int) -> int:
    """Computed tokens that must be recomputed if no other request keeps their blocks."""
    arrays = life.arrays
    table = arrays.block_table[slot, : arrays.num_blocks[slot]]
    num_shared = int(np.count_nonzero(life.cache.pool.ref_counts[table] > 1))
    return max(0, int(arrays.num_computed[slot]) - num_shared * arrays.block_size)
