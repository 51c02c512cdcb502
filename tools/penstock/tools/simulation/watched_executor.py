"""A simulated executor that reports the prefill of each step and generates no real tokens.

The prefill is read from the batch, because the engine's events do not report how much was computed
for a request that fails. Token values are not used, so every token is 0; the base class computes
them with hashes; this would take an eighth of the time of a run. If a request may end before its
`max_tokens`, this executor ends it at its output length with a stop result, so that the scheduler
has no more information in advance than with a real model.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.simulated.clock import WaitableClock
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.batch import Batch, SlotEnd, StepResult
from penstock.scheduler.request import FinishReason, RequestSpec

PrefillWatcher = Callable[[NDArray[np.int64], NDArray[np.int32]], None]
"""Called with distinct request keys [m] and the number of prompt tokens [m] that a step computes
for each.
"""

STOP_ID = 1
"""The stop id of requests that may end before their `max_tokens`. No token has this id: a `SlotEnd`
ends them.
"""
_NEVER = np.iinfo(np.int32).max

OutputLength = Callable[[int], int]
"""Returns the number of output tokens of the request with this key."""


class WatchedExecutor(SimulatedExecutor):
    """A SimulatedExecutor that calls `on_prefill` for every step with prefill tokens.

    `output_length`: a request ends after this number of output tokens, or at its `max_tokens` if
    that is less; None: always at its `max_tokens`.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        clock: WaitableClock,
        on_prefill: PrefillWatcher,
        output_length: OutputLength | None = None,
    ) -> None:
        super().__init__(config, clock=clock)
        self._on_prefill = on_prefill
        self._output_length = output_length
        # Per slot: number of tokens after which the request's last token is computed.
        self._stops_at: NDArray[np.int32] = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._totals: NDArray[np.int32] = self._stops_at[:0]
        self._zeros: NDArray[np.int32] = np.zeros(config.max_num_seqs, dtype=np.int32)

    def launch(self, batch: Batch) -> None:
        """Launch one step, and report its prefill tokens to `on_prefill`."""
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

    def _plain_result(self, batch: Batch) -> StepResult:
        slots = batch.sampled_slots
        self._totals = batch.starts + batch.num_tokens
        return StepResult(slots=slots, tokens=self._zeros[: len(slots)], ends=self._ends(batch))

    def _ends(self, batch: Batch) -> tuple[SlotEnd, ...]:
        if self._output_length is None:
            return ()
        # A prefill chunk that does not end the prompt never reaches the limit.
        is_last = self._totals >= self._stops_at[batch.slots]
        if not np.logical_or.reduce(is_last):
            return ()
        return tuple(
            SlotEnd(slot=slot, reason=FinishReason.STOP) for slot in batch.slots[is_last].tolist()
        )

    def _cost_s(self, batch: Batch) -> float:
        """Return the duration of the step by the cost model, seconds."""
        num_decodes = batch.num_decodes
        num_prefill = 0
        if batch.num_rows > num_decodes:
            num_prefill = int(np.add.reduce(batch.num_tokens[num_decodes:]))
        return self._config.cost.step_time_s(
            num_prefill_tokens=num_prefill,
            num_decodes=num_decodes,
            num_context_tokens=int(np.add.reduce(self._totals)),
        )
