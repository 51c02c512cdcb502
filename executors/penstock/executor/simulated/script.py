"""Determines which scripted faults fire in a step, and for which requests.

Counts how often each fault has fired; the caller injects the faults.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from penstock.executor.fault import Fault
from penstock.scheduler.request import Request


class FaultScript:
    """The faults of one executor, with the number of times that each may still fire."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._times_left = [fault.max_times for fault in faults]
        self._ordinals: dict[int, int] = {}
        self._max_ordinal = max((fault.at_request or 0 for fault in faults), default=0)
        self._trigger_ids = {fault.at_prompt_token for fault in faults} - {None}
        self._keys: dict[int, int] = {}
        self._trigger_ids_by_slot: dict[int, frozenset[int]] = {}

    @property
    def is_exhausted(self) -> bool:
        """True when no fault can fire any longer."""
        return not any(self._times_left)

    def admit(self, request: Request) -> None:
        """Record the slot of a request, its number in order of first admission, and which of the
        faults' `at_prompt_token` ids its prompt contains.
        """
        key = request.spec.key
        # To limit memory, requests after the last `at_request` in the script are not recorded.
        if key not in self._ordinals and len(self._ordinals) < self._max_ordinal:
            self._ordinals[key] = len(self._ordinals) + 1
        self._keys[request.slot] = key
        if self._trigger_ids:
            # Exclude replayed output: tokens that a model generated are not a poisoned prompt.
            prompt = request.spec.prompt_ids[: request.spec.num_original_prompt_tokens]
            self._trigger_ids_by_slot[request.slot] = frozenset(
                token
                for token in self._trigger_ids
                if token is not None and bool((prompt == token).any())
            )

    def fire(
        self, step: int, slots: NDArray[np.int32], output_indices: NDArray[np.int32]
    ) -> tuple[list[Fault], dict[int, list[Fault]]]:
        """Return and count the faults that fire in this step: a list of the faults of the whole
        executor, and a dict that maps an index into `slots` to the faults of this request.

        `step`: number of the step, from 1. `slots` [m]: the sampled slots in row order.
        `output_indices` [m]: index of the output token that each slot is about to get.
        """
        of_executor: list[Fault] = []
        of_rows: dict[int, list[Fault]] = defaultdict(list)
        for i, fault in enumerate(self._faults):
            if not self._times_left[i] or (fault.at_step is not None and step < fault.at_step):
                continue
            rows = [
                row
                for row, slot in enumerate(slots.tolist())
                if self._is_met(fault, slot, int(output_indices[row]))
            ]
            if fault.is_for_request:
                rows = rows[: self._times_left[i]]
                for row in rows:
                    of_rows[row].append(fault)
                self._times_left[i] -= len(rows)
            elif rows or not fault.is_conditional_on_request:
                of_executor.append(fault)
                self._times_left[i] -= 1
        return of_executor, of_rows

    def _is_met(self, fault: Fault, slot: int, output_index: int) -> bool:
        if fault.at_output is not None and output_index != fault.at_output:
            return False
        if fault.at_request is not None:
            ordinal = self._ordinals.get(self._keys.get(slot, 0))
            if ordinal != fault.at_request:
                return False
        return (
            fault.at_prompt_token is None
            or fault.at_prompt_token in self._trigger_ids_by_slot.get(slot, frozenset())
        )
