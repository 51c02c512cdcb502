"""Computes the limits of a step from the cost model.

Contains the fit of the cost model and, if there is an inter-token latency target, the two limits
computed from it: the prefill budget of a step and the number of running requests. Without a target
both limits are fixed.
"""

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import StepMeasure
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.latency_target import BatchLimit, PrefillLimit
from penstock.scheduler.step_fit import DEFAULT_PRIOR, StepFit

_LEARN_EVERY_STEPS = 8
_LEARN_EVERY_PREFILL_STEPS = 2
_CONFIRMING_STEPS = 16


class StepSizing:
    """Learns the cost model from the steps of one executor and sets the limits of the next steps.

    `fit`: the cost model; `last_step_s`: the duration of the last step, seconds, and
    `last_step_at_s`: when it ended, engine clock. Raises ValueError for a target together with a
    self-paced executor (see `ExecutorInfo`), because the scheduler does not determine its steps.
    """

    def __init__(self, info: ExecutorInfo, config: SchedulerConfig) -> None:
        cost = config.known_cost
        # Measured coefficients may be from another machine, or in other units: a few steps must
        # confirm them.
        self.fit = (
            StepFit(DEFAULT_PRIOR) if cost is None else StepFit(cost, min_steps=_CONFIRMING_STEPS)
        )
        self.last_step_s = 0.0
        self.last_step_at_s = 0.0
        self._num_unlearnt = 0
        self._is_self_paced = info.is_self_paced
        self._max_tokens = config.max_num_batched_tokens
        self._max_num_seqs = info.max_num_seqs
        self._prefill: PrefillLimit | None = None
        self._batch: BatchLimit | None = None
        target_s = self._target_s = config.target_itl_s
        if target_s is None:
            return
        if info.is_self_paced:
            raise ValueError(
                f"target_itl_s requires an executor whose steps the scheduler plans; {info.name} is"
                " self-paced"
            )
        least = min(info.block_size, self._max_tokens)
        self._prefill = PrefillLimit(
            target_s,
            max_prefill_tokens=self._max_tokens,
            min_prefill_tokens=least,
            quantum_tokens=info.block_size,
        )
        self._batch = BatchLimit(target_s, max_num_seqs=info.max_num_seqs, min_prefill_tokens=least)

    @property
    def has_cost(self) -> bool:
        """Whether enough steps were observed for estimates; False with a self-paced executor."""
        return not self._is_self_paced and self.fit.has_seen_enough

    @property
    def max_num_running(self) -> int:
        """Number of requests that may run together, as of the last step."""
        return self._max_num_seqs if self._batch is None else self._batch.num_seqs

    @property
    def prefill_budget_tokens(self) -> int:
        """The current prefill budget of steps with decodes."""
        return self._max_tokens if self._prefill is None else self._prefill.held_tokens

    def note_step(self, seconds: float, now: float, *, has_prefill: bool) -> bool:
        """Record the duration of a step; return whether to call `learn` for it.

        Once the fit is accurate, only some of the steps are used for learning.
        """
        self.last_step_s, self.last_step_at_s = seconds, now
        self._num_unlearnt += 1
        every = _LEARN_EVERY_PREFILL_STEPS if has_prefill else _LEARN_EVERY_STEPS
        if self._num_unlearnt < every and self.fit.is_trusted:
            return False
        self._num_unlearnt = 0
        return True

    def learn(self, measure: StepMeasure) -> None:
        """Learn from the content and the duration of a step."""
        self.fit.observe(
            measure.seconds,
            num_prefill_tokens=measure.num_prefill_tokens,
            num_decodes=measure.num_decodes,
            num_context_tokens=measure.num_context_tokens,
        )

    @property
    def has_target(self) -> bool:
        """Whether there is an inter-token latency target."""
        return self._target_s is not None

    def is_within_target(self, gap_s: float) -> bool:
        """Return whether a predicted time between tokens, seconds, is within the latency target.
        Without a target, or while there is no cost model, return True.
        """
        return self._target_s is None or not self.has_cost or gap_s <= self._target_s

    def budget(
        self, num_decodes: int, num_context_tokens: int = 0, num_decode_context_tokens: int = 0
    ) -> int:
        """Return the prefill token budget of a step with these decodes; call it once per step.

        `num_context_tokens`: context of all running requests; `num_decode_context_tokens`: context
        of the decodes. Both are used only with a latency target.
        """
        left = self._max_tokens - num_decodes
        if self._prefill is None or self._batch is None:
            return left
        fit = self.fit
        is_trusted, margin = fit.is_trusted, fit.error_p90
        self._batch.observe(
            fit,
            is_trusted=is_trusted,
            num_decodes=num_decodes,
            num_context_tokens=num_decode_context_tokens,
            margin=margin,
        )
        paced = self._prefill.budget(
            fit,
            is_trusted=is_trusted,
            num_decodes=num_decodes,
            num_context_tokens=num_context_tokens,
            margin=margin,
        )
        return min(left, paced.num_prefill_tokens)
