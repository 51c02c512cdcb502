"""A simulated executor that reports the prefill of each step and generates no real tokens.

Owns the inspection of the batch. The engine's events of a request do not include how much was
computed for it, which is lost if the request fails. Tokens of simulated requests are not used, so
every token is 0: hashing them would take an eighth of a run. Requests that ask for more tokens than
they generate have a stop id, as with a model, and this executor ends them at their length: the
scheduler has no more information than with a model.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.pace import Pacer
from penstock.scheduler.batch import Batch, SlotEnd, StepResult
from penstock.scheduler.request import FinishReason, RequestSpec

PrefillWatcher = Callable[[NDArray[np.int64], NDArray[np.int32]], None]
"""Called with distinct keys [m] and the number of tokens [m] that a step prefills for each."""

STOP_ID = 1
"""Stop id of requests that end by themselves. No token has this id: `SlotEnd` ends them."""
_NEVER = np.iinfo(np.int32).max

OutputLength = Callable[[int], int]
"""Returns the number of tokens that the request with a key generates."""


class WatchedExecutor(SimulatedExecutor):
    """Calls `on_prefill` for every step that prefills.

    `output_length`: a request stops after this number of tokens, or at its limit; None: every
    request reaches its limit.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        pacer: Pacer,
        on_prefill: PrefillWatcher,
        output_length: OutputLength | None = None,
    ) -> None:
        super().__init__(config, pacer=pacer)
        self._on_prefill = on_prefill
        self._output_length = output_length
        # Number of tokens of a slot's request from which its last token is computed.
        self._stops_at: NDArray[np.int32] = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._totals: NDArray[np.int32] = self._stops_at[:0]
        self._zeros: NDArray[np.int32] = np.zeros(config.max_num_seqs, dtype=np.int32)

    def launch(self, batch: Batch) -> None:
        """See `SimulatedExecutor`."""
        if self._output_length is not None:
            for request in batch.admitted:
                spec = request.spec
                num_output = self._output_length(spec.key)
                is_cut = num_output >= spec.max_tokens
                last = _NEVER if is_cut else len(spec.prompt_ids) + num_output - 1
                self._stops_at[request.slot] = last
        super().launch(batch)
        if batch.num_rows > batch.num_decodes:
            slots = batch.slots[batch.num_decodes :]
            self._on_prefill(batch.arrays.key[slots], batch.num_tokens[batch.num_decodes :])

    def _is_special(self, spec: RequestSpec) -> bool:  # noqa: ARG002
        return False

    def _plain_answer(self, batch: Batch) -> StepResult:
        slots = batch.sampled_slots
        self._totals = batch.starts + batch.num_tokens
        return StepResult(slots=slots, tokens=self._zeros[: len(slots)], ends=self._ends(batch))

    def _ends(self, batch: Batch) -> tuple[SlotEnd, ...]:
        if self._output_length is None:
            return ()
        # A prefill chunk before the end of the prompt never reaches the limit.
        is_last = self._totals >= self._stops_at[batch.slots]
        if not np.logical_or.reduce(is_last):
            return ()
        return tuple(
            SlotEnd(slot=slot, reason=FinishReason.STOP) for slot in batch.slots[is_last].tolist()
        )

    def _cost_s(self, batch: Batch) -> float:
        """See `SimulatedExecutor`; the sum is already computed."""
        num_decodes = batch.num_decodes
        num_prefill = 0
        if batch.num_rows > num_decodes:
            num_prefill = int(np.add.reduce(batch.num_tokens[num_decodes:]))
        return self._config.cost.step_time_s(
            num_prefill_tokens=num_prefill,
            num_decodes=num_decodes,
            num_context_tokens=int(np.add.reduce(self._totals)),
        )
