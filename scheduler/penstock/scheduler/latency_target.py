"""Limits each step so that the inter-token latency of running requests stays within a target.

Two limits are computed from the fitted cost model: the prefill budget of each step (`PrefillLimit`)
and how many requests may run together (`BatchLimit`). They take no measurements and read no clock.
Only prefill and admissions are limited; running requests keep their slots and blocks.

Decodes go first in every step, and prefill takes the remaining time, in chunks: stall-free batching
(Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, OSDI
2024), with the fixed token budget of that paper replaced by one computed from the decodes and
context of the step.

Both limits are feed-forward: a limit is a function of the cost model and of the step's content, not
of the last error, so there is no integrator to overshoot, and no oscillation with constant
coefficients. One feedback path remains, through the fit: the cost model is learned from the planned
steps. On a machine with nonlinear costs (kernels that pad rows to tiles) it could learn one cost
below a limit and another above. So the budget falls immediately and never exceeds what the cost
model allows (or the minimum prefill, if that is more). It rises only past a dead band, by a
fraction of itself at a time. A rise that is reversed under the same load doubles the wait before
the next rise to the same level. Under a steady load, changes become rare until the budget is
constant. The batch limit changes more slowly, since running requests are not removed. It stays
within a sixteenth of what the cost model allows, and uses the recent peak of the context length:
contexts of requests that started together grow together, so a limit based on the current length
would admit too many at first.
"""

import math
from dataclasses import dataclass

from penstock.scheduler.cost_model import StepCost

_BAND = 17 / 16
_MAX_RISE_SHARE = 1 / 4
_PATIENCE_STEPS = 64
_MIN_WAIT_STEPS = 64
_MAX_WAIT_STEPS = 65_536
_MAX_MARGIN = 0.5
_MARGIN_SMOOTHING = 1 / 32
_CONTEXT_SMOOTHING = 1 / 32
_CONTEXT_FADING = 1 / 1024
_HEAVIER = 5 / 4
_MAX_LIMIT_MOVE_SHARE = 1 / 16
_DEFAULT_PERIOD_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """The prefill budget of one step. `predicted_step_s`: duration of the whole step if the budget
    is used up.

    `is_over_target`: whether the step has decodes and `predicted_step_s` exceeds the target. Then
    either the decodes leave less time than the minimum prefill takes, or the cost model is not
    trusted. In the first case the excess is at most the cost of `min_prefill_tokens`, plus any
    excess of the decodes alone.
    """

    num_prefill_tokens: int
    predicted_step_s: float
    is_over_target: bool


class PrefillLimit:
    """The prefill budget of each step for a target inter-token latency.

    The aim leaves a margin for the error of the cost model, so that fewer than half of the steps
    miss the target: aim = target / (1 + m), with m the smoothed margin (pass `StepFit.error_p90`;
    at most 0.5). A prefill token costs its own coefficient plus the coefficient of one context
    token, because it lengthens its chunk:

        ideal = (aim - cost of decodes and context) / (prefill_token_s + context_token_s)

    in whole multiples of `quantum_tokens`, within `min_prefill_tokens` .. `max_prefill_tokens`. The
    budget falls to the ideal directly; it rises towards 16/17 of the ideal, by a quarter of itself
    (and at least one quantum) a step. A rise that is reversed within 64 steps, with at most a
    quarter more decodes and context than at the rise, is a failed probe: the next rise to that
    level under a similar load waits 64 steps, and twice as long after each further failure. A step
    without decodes gets the maximum, since no request waits for tokens. The budget starts at the
    fixed `max_prefill_tokens`. When the cost model is no longer trusted, the budget is held for 64
    steps so that the fit can adapt to a changed machine, and then rises to the fixed limit in the
    same way.

    `target_itl_s`: seconds. `min_prefill_tokens`: tokens that a step may always prefill, so that
    prompts never stall. Raises ValueError naming the invalid parameter.
    """

    __slots__ = (
        "_held",
        "_margin",
        "_max",
        "_min",
        "_num_distrusted",
        "_probes",
        "_quantum",
        "_target_s",
    )

    def __init__(
        self,
        target_itl_s: float,
        *,
        max_prefill_tokens: int,
        min_prefill_tokens: int = 16,
        quantum_tokens: int = 16,
    ) -> None:
        _check_target(target_itl_s)
        if min_prefill_tokens < 1:
            raise ValueError(f"min_prefill_tokens must be at least 1, not {min_prefill_tokens}")
        if max_prefill_tokens < min_prefill_tokens:
            raise ValueError(
                f"max_prefill_tokens ({max_prefill_tokens}) must be at least "
                f"min_prefill_tokens ({min_prefill_tokens})"
            )
        if quantum_tokens < 1:
            raise ValueError(f"quantum_tokens must be at least 1, not {quantum_tokens}")
        self._target_s = target_itl_s
        self._min = min_prefill_tokens
        self._max = max_prefill_tokens
        self._quantum = quantum_tokens
        self._held = max_prefill_tokens
        self._margin = 0.0
        self._num_distrusted = 0
        self._probes = Probes()

    @property
    def held_tokens(self) -> int:
        """The prefill budget of the last step that had decodes, in tokens; `max_prefill_tokens` if
        there was no such step yet.
        """
        return self._held

    def budget(
        self,
        cost: StepCost,
        *,
        is_trusted: bool,
        num_decodes: int,
        num_context_tokens: int,
        margin: float = 0.0,
    ) -> StepBudget:
        """Return the prefill budget of a step with this many decodes; call it once per step.

        `cost`, `is_trusted`: the cost model, and whether it is accurate. `num_context_tokens`:
        context of the decodes, and the start positions of the current prefills. `margin`: the error
        of the cost model (`StepFit.error_p90`); it is smoothed here.
        """
        self._margin += _MARGIN_SMOOTHING * (min(max(margin, 0.0), _MAX_MARGIN) - self._margin)
        base_s = cost.step_time_s(
            num_prefill_tokens=0, num_decodes=num_decodes, num_context_tokens=num_context_tokens
        )
        token_s = cost.prefill_token_s + cost.context_token_s
        num_tokens = self._max
        if num_decodes:
            self._probes.begin_step(num_decodes, num_context_tokens)
            num_tokens = self._held = self._next_budget(self._ideal(base_s, token_s, is_trusted))
        predicted_s = base_s + num_tokens * token_s
        return StepBudget(
            num_prefill_tokens=num_tokens,
            predicted_step_s=predicted_s,
            is_over_target=bool(num_decodes) and predicted_s > self._target_s,
        )

    def _ideal(self, base_s: float, token_s: float, is_trusted: bool) -> float:
        """Return the budget that the cost model allows; infinite if it sets no limit. While the
        cost model is not trusted, return the current budget for 64 steps, and then infinity.
        """
        if not is_trusted:
            self._num_distrusted += 1
            # A held budget counts as neither a rise nor a fall.
            return self._held if self._num_distrusted <= _PATIENCE_STEPS else math.inf
        self._num_distrusted = 0
        left_s = self._target_s / (1.0 + self._margin) - base_s
        if left_s <= 0.0:
            return 0.0
        return left_s / token_s if token_s else math.inf

    def _next_budget(self, ideal: float) -> int:
        held = self._held
        lowest = self._whole(ideal)
        if lowest < held:
            self._probes.note_fall()
            return lowest
        highest = self._whole(ideal / _BAND)
        risen = min(highest, held + max(int(held * _MAX_RISE_SHARE), self._quantum))
        if risen <= held or not self._probes.may_rise(risen):
            return held
        self._probes.note_rise(risen)
        return risen

    def _whole(self, ideal: float) -> int:
        """Return `ideal` tokens rounded down to whole quanta, within the limits."""
        if ideal >= self._max:
            return self._max
        num_tokens = int(ideal)
        return max(num_tokens - num_tokens % self._quantum, self._min)


class Probes:
    """Tracks rises of a limit, and how long to wait after a rise that was reversed.

    A fall is expected when the load grows. A fall without more load than at the last rise shows
    that the rise changed the cost model.
    """

    __slots__ = (
        "_failed_level",
        "_level",
        "_load",
        "_num_steps",
        "_probe_load",
        "_rose_at",
        "_wait",
        "_wait_until",
    )

    def __init__(self) -> None:
        self._num_steps = 0
        self._load = self._probe_load = (0, 0)
        self._level = 0
        self._failed_level = 0
        self._rose_at = -1
        self._wait = 0
        self._wait_until = 0

    def begin_step(self, num_decodes: int, num_context_tokens: int) -> None:
        """Begin a step with these counts of decodes and context tokens."""
        self._num_steps += 1
        self._load = (num_decodes, num_context_tokens)
        if 0 <= self._rose_at < self._num_steps - _PATIENCE_STEPS:
            # The rise was not reversed in time: it succeeded.
            self._rose_at = -1
            if self._level >= self._failed_level:
                self._wait = 0

    def may_rise(self, level: int) -> bool:
        """Return whether a rise to `level` is allowed. It is if `level` is below the level that
        last failed, if the wait is over, or if the load is lighter than at the last rise.
        """
        return (
            level < self._failed_level or self._num_steps >= self._wait_until or self._is_lighter()
        )

    def note_rise(self, level: int) -> None:
        """Record that the limit rises to `level` in this step."""
        self._rose_at = self._num_steps
        self._level = level
        self._probe_load = self._load

    def note_fall(self) -> None:
        """Record that the limit falls in this step."""
        if self._rose_at < 0:
            return
        # The rise was reversed: it failed, whatever the cause.
        self._rose_at = -1
        if self._is_heavier():
            return
        self._failed_level = self._level
        self._wait = min(max(2 * self._wait, _MIN_WAIT_STEPS), _MAX_WAIT_STEPS)
        self._wait_until = self._num_steps + self._wait

    def _is_lighter(self) -> bool:
        return any(
            now * _BAND < then for now, then in zip(self._load, self._probe_load, strict=True)
        )

    def _is_heavier(self) -> bool:
        """Return whether the load has grown since the last rise of the limit by more than it
        usually varies between steps.
        """
        return any(
            now > then * _HEAVIER for now, then in zip(self._load, self._probe_load, strict=True)
        )


class BatchLimit:
    """Limits how many requests run together, so that a step of decodes alone meets the target.

    With c the recent peak of the mean context of a running request, r the minimum prefill of a
    step, for which time is reserved, and aim = target / (1 + margin), the margin at most 0.5:

        ideal = (aim - step_s - r prefill_token_s) / (decode_slot_s + c context_token_s)

    Every `period_steps` the limit moves towards the ideal by at most a sixteenth of itself (at
    least 1). It stays if it differs from the ideal by at most a sixteenth of itself, or is at most
    1 below the ideal (but an ideal at a bound is always reached). It limits admission: running
    requests stay, so after a fall the batch shrinks as they end. It starts at `max_num_seqs`, and
    moves back there in the same way while the cost model is not trusted. Raises ValueError naming
    the invalid parameter.
    """

    __slots__ = (
        "_context_tokens",
        "_limit",
        "_max",
        "_min",
        "_num_steps",
        "_period",
        "_reserve_tokens",
        "_target_s",
    )

    def __init__(
        self,
        target_itl_s: float,
        *,
        max_num_seqs: int,
        min_num_seqs: int = 1,
        min_prefill_tokens: int = 16,
        period_steps: int = _DEFAULT_PERIOD_STEPS,
    ) -> None:
        _check_target(target_itl_s)
        if not 1 <= min_num_seqs <= max_num_seqs:
            raise ValueError(
                f"min_num_seqs must be in 1 .. max_num_seqs ({max_num_seqs}), not {min_num_seqs}"
            )
        if min_prefill_tokens < 0:
            raise ValueError(f"min_prefill_tokens must not be negative, not {min_prefill_tokens}")
        if period_steps < 1:
            raise ValueError(f"period_steps must be at least 1, not {period_steps}")
        self._target_s = target_itl_s
        self._max = max_num_seqs
        self._min = min_num_seqs
        self._reserve_tokens = min_prefill_tokens
        self._period = period_steps
        self._limit = max_num_seqs
        self._context_tokens = -1.0
        self._num_steps = 0

    @property
    def num_seqs(self) -> int:
        """Number of requests that may run together."""
        return self._limit

    def observe(
        self,
        cost: StepCost,
        *,
        is_trusted: bool,
        num_decodes: int,
        num_context_tokens: int,
        margin: float = 0.0,
    ) -> int:
        """Record a step with these decodes; in every `period_steps`th call adjust the limit. Return
        the limit.

        Arguments as in `PrefillLimit.budget`, but `num_context_tokens` is the context of the
        decodes only, and `margin` is not smoothed.
        """
        if num_decodes:
            mean = num_context_tokens / num_decodes
            if self._context_tokens < 0.0:
                self._context_tokens = mean
            rate = _CONTEXT_SMOOTHING if mean > self._context_tokens else _CONTEXT_FADING
            self._context_tokens += rate * (mean - self._context_tokens)
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            self._move(self._ideal(cost, margin) if is_trusted else self._max)
        return self._limit

    def _ideal(self, cost: StepCost, margin: float) -> int:
        if self._context_tokens < 0.0:
            return self._limit
        aim_s = self._target_s / (1.0 + min(max(margin, 0.0), _MAX_MARGIN))
        left_s = aim_s - cost.step_s - self._reserve_tokens * cost.prefill_token_s
        each_s = cost.decode_slot_s + self._context_tokens * cost.context_token_s
        if left_s >= self._max * each_s:
            return self._max
        return max(int(left_s / each_s), self._min) if left_s > 0.0 else self._min

    def _move(self, ideal: int) -> None:
        distance = ideal - self._limit
        band = int(self._limit * _MAX_LIMIT_MOVE_SHARE)
        step = max(band, 1)
        is_near = -band <= distance <= step
        if is_near and ideal not in (self._min, self._max):
            return
        self._limit += min(max(distance, -step), step)


def _check_target(target_itl_s: float) -> None:
    if not (math.isfinite(target_itl_s) and target_itl_s > 0.0):
        raise ValueError(f"target_itl_s must be finite and above zero, not {target_itl_s}")
