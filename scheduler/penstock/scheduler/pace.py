"""How fast the machine is, and what a step may hold because of it.

Owns the fit of a step's prices, and the two limits that follow it where there is a target for the
time between tokens: the prefill budget of a step and the number of requests that run. Without a
target both are the fixed ones. Does not know who runs.
"""

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.pacing import BatchLimit, PrefillPacer
from penstock.scheduler.step_fit import DEFAULT_PRIOR, StepFit
from penstock.scheduler.step_measure import StepMeasure

_LEARN_EVERY_STEPS = 8


class Pace:
    """Learns from the steps of one executor and limits the next ones.

    `fit`: the prices; `last_step_s`: what the last step took, seconds. ValueError for a target
    together with an executor that paces itself: what its steps hold is not for the scheduler to
    say.
    """

    def __init__(self, info: ExecutorInfo, config: SchedulerConfig) -> None:
        prices = config.known_prices
        self.fit = StepFit(DEFAULT_PRIOR) if prices is None else StepFit(prices, min_steps=0)
        self.last_step_s = 0.0
        self._num_unlearnt = 0
        self._is_self_paced = info.is_self_paced
        self._max_tokens = config.max_num_batched_tokens
        self._max_num_seqs = info.max_num_seqs
        self._prefill: PrefillPacer | None = None
        self._batch: BatchLimit | None = None
        target_s = config.target_itl_s
        if target_s is None:
            return
        if info.is_self_paced:
            raise ValueError(
                f"target_itl_s needs an executor whose steps are planned here; {info.name} paces"
                " itself"
            )
        least = min(info.block_size, self._max_tokens)
        self._prefill = PrefillPacer(
            target_s,
            max_prefill_tokens=self._max_tokens,
            min_prefill_tokens=least,
            quantum_tokens=info.block_size,
        )
        self._batch = BatchLimit(target_s, max_num_seqs=info.max_num_seqs, min_prefill_tokens=least)

    @property
    def is_known(self) -> bool:
        """Whether the prices are good enough to foretell anything."""
        return not self._is_self_paced and self.fit.is_trusted

    @property
    def max_num_running(self) -> int:
        """Requests that may run at once, as of the last step."""
        return self._max_num_seqs if self._batch is None else self._batch.num_seqs

    @property
    def prefill_budget_tokens(self) -> int:
        """What steps with decodes give to prefill at present."""
        return self._max_tokens if self._prefill is None else self._prefill.held_tokens

    def note_step(self, seconds: float, *, has_prefill: bool) -> bool:
        """A step was timed; whether it is worth learning from.

        Of a machine that is known well, decodes tell nothing new in every step.
        """
        self.last_step_s = seconds
        self._num_unlearnt += 1
        is_due = has_prefill or self._num_unlearnt >= _LEARN_EVERY_STEPS
        if not is_due and self.fit.is_trusted:
            return False
        self._num_unlearnt = 0
        return True

    def learn(self, measure: StepMeasure) -> None:
        """What was in a step, and what it took."""
        self.fit.observe(
            measure.seconds,
            num_prefill_tokens=measure.num_prefill_tokens,
            num_decodes=measure.num_decodes,
            num_context_tokens=measure.num_context_tokens,
        )

    @property
    def has_target(self) -> bool:
        """Whether there is a target for the time between tokens."""
        return self._prefill is not None

    def budget(self, num_decodes: int, num_context_tokens: int) -> int:
        """Prefill tokens of a step with these decodes; to be asked once for each step.

        `num_context_tokens` counts with a target alone.
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
            num_context_tokens=num_context_tokens,
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
