"""Fits the cost model of a step at run time.

Contains the online fit and the measure of its quality. Takes no measurements itself. Deterministic:
the same observations give the same coefficients.

The method is recursive least squares on relative residuals (Ljung, *System Identification*, 2nd
ed., chapter 11), with four changes:

- Forgetting only in observed directions (directional forgetting in information form: Cao and
  Schwartz, *Automatica* 36, 2000), so that an unobserved coefficient keeps its last value
  (initially the prior) instead of drifting, and the information never decays to zero (wind-up).
- Huber's weights on the residuals against their recent median (Huber and Ronchetti, *Robust
  Statistics*), so that a pause by the garbage collector or a compilation has no more weight than an
  ordinary slow step.
- Projection onto coefficients that are not negative, in the metric of the information matrix
  (Goodwin and Sin, *Adaptive Filtering, Prediction and Control*).
- A shorter memory while the fit is wrong (variable forgetting after Fortescue, Kershenbaum and
  Ydstie, *Automatica* 17, 1981), and one jump of all coefficients together when most recent steps
  show a change of the machine's speed by a quarter or more.
"""

import math
from bisect import bisect_left, insort
from collections import deque

from penstock.scheduler.cost_model import (
    MAX_COST_S,
    NUM_LATEST,
    SEEDED_SHARE,
    UNKNOWN_ERROR,
    WINDOW,
    CostModel,
    RecentErrors,
    StepError,
)

_Row = list[float]

DEFAULT_PRIOR = CostModel()

_NUM_COEFFICIENTS = 4
_PRIOR_INFORMATION = 0.0001
"""Weight of the prior per coefficient, in steps: small, so that the coefficients of observed steps
are learned quickly.
"""
_MEMORY_WHILE_WRONG = 50.0
_JUMP_WINDOW = 16
"""Number of latest residuals whose median shows that the machine's speed changed: nine steps that
agree suffice, and nearly half may be outliers.
"""
_HUBER_SIGMAS = 2.5
SIGMA_OF_MEDIAN = 1.4826
"""Standard deviation of a normal distribution over the median of its absolute values."""
_MIN_SIGMA = 0.02
"""Minimum of sigma, so that a change of a few per cent is no outlier where step times hardly vary.
"""
_MIN_STEP_S = 1e-6
"""Residuals are relative to at least this time, to avoid a division by zero."""
_JUMP_FACTOR = 1.25
_MAX_EXCESS = 0.9
_MIN_PIVOT_SHARE = 1e-12
_JUMP_FADE = 4.0
"""Divisor of the information matrix at a jump, because coefficients may change by different
factors.
"""


class StepFit:
    """The cost model of a step, fitted at run time; a `StepCost`.

    Model of a step of y seconds with P prefill tokens, D decode rows and C context tokens:
    y = step_s + prefill_token_s P + decode_slot_s D + context_token_s C + noise that grows with the
    step. So the fit uses the relative residual e = (y - f) / f and the relative features z = x / f,
    where f is the prediction for a step with features x. The weight of each step is
    w = min(1, b / |e|), b = 2.5 sigma, sigma = 1.4826 median(|e| of the last 64 steps of its kind,
    with prefill or without), at least 0.02:

        R <- R - (1 - l) w (R z)(R z)' / (z' R z) + w z z'        information
        d = R^-1 z w e, shortened so that |z' d| <= b             bounds the effect of one step
        coefficients <- project(coefficients + d)                 in the metric of R, all >= 0

    l = 1 - 1/memory_steps, and 1 - 1/50 while the median error is above `max_error`. The machine's
    speed has changed if g = 1 + median(the last 16 e) is at least 1.25 or at most 0.8, unless one
    kind of step is predicted as well as before. Then all coefficients are multiplied by g, R is
    divided by 4 g**2 (a quarter of the certainty, relative to the new coefficients), and the steps
    with prefill for `is_trusted` are counted again from 0.

    `prior`: the initial coefficients. `memory_steps`: after how many steps along a direction
    earlier observations have weight 1/e; under a mixed load the memory is up to four times as long,
    since each direction is forgotten only by its own steps. `is_trusted` becomes true after
    `min_steps` steps, once at least `min_steps` // 4 have prefill. It becomes false when the median
    error is over `max_error`, and true again when it is at most 0.8 `max_error`. Raises ValueError
    naming the invalid parameter.
    """

    __slots__ = (
        "_coefficients",
        "_information",
        "_is_stale",
        "_kinds",
        "_max_error",
        "_memory_steps",
        "_min_steps",
        "_model",
        "_recent",
        "_scales",
        "_sorted_recent",
        "num_steps",
    )

    def __init__(
        self,
        prior: CostModel = DEFAULT_PRIOR,
        *,
        memory_steps: int = 200,
        min_steps: int = 32,
        max_error: float = 0.25,
    ) -> None:
        if memory_steps < 2:
            raise ValueError(f"memory_steps must be at least 2, not {memory_steps}")
        if min_steps < 0:
            raise ValueError(f"min_steps must not be negative, not {min_steps}")
        if not 0.0 < max_error < 1.0:
            raise ValueError(f"max_error must be between 0 and 1, not {max_error}")
        self.num_steps = 0
        self._memory_steps = float(memory_steps)
        self._min_steps = min_steps
        self._max_error = max_error
        self._coefficients = list(_coefficients_of(prior))
        # Coefficients are scaled by their prior, which keeps the equations well conditioned. The
        # scale has a minimum, so that a coefficient with a prior near zero can still become large.
        scale = max(prior.step_s / DEFAULT_PRIOR.step_s, 1.0)
        self._scales = [
            max(coefficient, default * scale)
            for coefficient, default in zip(
                self._coefficients, _coefficients_of(DEFAULT_PRIOR), strict=True
            )
        ]
        self._information = _prior_information()
        # Errors by kind of step, without and with prefill: the quality for one kind implies nothing
        # for the other, and in a common window the errors of the rarer kind would count as
        # outliers.
        self._kinds = (RecentErrors(max_error), RecentErrors(max_error))
        self._begin_recent()
        self._model = prior
        self._is_stale = False

    @property
    def step_s(self) -> float:
        """Fixed cost of a step, seconds."""
        return self._coefficients[0]

    @property
    def prefill_token_s(self) -> float:
        """Cost of each prefill token computed, seconds."""
        return self._coefficients[1]

    @property
    def decode_slot_s(self) -> float:
        """Cost of each decode row, seconds."""
        return self._coefficients[2]

    @property
    def context_token_s(self) -> float:
        """Cost of each token of context that a row attends to, seconds."""
        return self._coefficients[3]

    @property
    def model(self) -> CostModel:
        """The current coefficients, as an immutable value."""
        if self._is_stale:
            step_s, prefill_token_s, decode_slot_s, context_token_s = self._coefficients
            self._model = CostModel(
                step_s=step_s,
                prefill_token_s=prefill_token_s,
                decode_slot_s=decode_slot_s,
                context_token_s=context_token_s,
            )
            self._is_stale = False
        return self._model

    @property
    def error_p90(self) -> float:
        """90th percentile of |measured - predicted| / predicted over the last 64 steps of a kind.

        Each step is predicted before the fit learns from it. Steps with prefill and without are two
        kinds; the value is the worse of the kinds seen so far.
        """
        return max((kind.p90 for kind in self._seen_kinds()), default=self._kinds[0].p90)

    @property
    def prefill_error(self) -> StepError:
        """The error of predictions for steps with prefill; `UNKNOWN_ERROR` if it is large or too
        few steps were observed.
        """
        return self._error_of(self._kinds[1])

    @property
    def decode_error(self) -> StepError:
        """The error of predictions for steps without prefill; `UNKNOWN_ERROR` if it is large or too
        few steps were observed.
        """
        return self._error_of(self._kinds[0])

    def _error_of(self, kind: RecentErrors) -> StepError:
        is_known = kind.is_good and kind.num_seen >= self._min_steps // 4
        if not (is_known and self.has_seen_enough):
            return UNKNOWN_ERROR
        return StepError(bias=max(kind.bias, -_MAX_EXCESS), p90=kind.p90)

    @property
    def is_trusted(self) -> bool:
        """Whether enough steps were observed and the recent predictions were accurate."""
        return (
            all(kind.is_good for kind in self._seen_kinds())
            and self.has_seen_enough
            and self._kinds[1].num_seen >= self._min_steps // 4
        )

    @property
    def has_seen_enough(self) -> bool:
        """Whether enough steps were observed for the coefficients to reflect this machine instead
        of the prior.

        They need not be accurate yet; see `is_trusted`.
        """
        return self.num_steps >= self._min_steps

    def step_time_s(
        self, *, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """Return the predicted seconds of a step; `num_context_tokens` is the sum over all rows."""
        step_s, prefill_token_s, decode_slot_s, context_token_s = self._coefficients
        return (
            step_s
            + prefill_token_s * num_prefill_tokens
            + decode_slot_s * num_decodes
            + context_token_s * num_context_tokens
        )

    def observe(
        self,
        measured_s: float,
        *,
        num_prefill_tokens: int,
        num_decodes: int,
        num_context_tokens: int,
    ) -> None:
        """Learn from one step: its duration in seconds and its content, counted as in
        `step_time_s`.

        Raises ValueError if `measured_s` is negative or not finite, or if a count is negative.
        """
        if not (math.isfinite(measured_s) and measured_s >= 0.0):
            raise ValueError(f"measured_s must be finite and not negative, not {measured_s}")
        if num_prefill_tokens < 0 or num_decodes < 0 or num_context_tokens < 0:
            raise ValueError(
                "num_prefill_tokens, num_decodes and num_context_tokens must not be negative, not "
                f"{num_prefill_tokens}, {num_decodes}, {num_context_tokens}"
            )
        predicted_s = self.step_time_s(
            num_prefill_tokens=num_prefill_tokens,
            num_decodes=num_decodes,
            num_context_tokens=num_context_tokens,
        )
        unit_s = max(predicted_s, _MIN_STEP_S)
        residual = (measured_s - predicted_s) / unit_s
        kind = self._kinds[num_prefill_tokens > 0]
        self._note(kind, residual)
        scales = self._scales
        features = [
            scales[0] / unit_s,
            scales[1] * num_prefill_tokens / unit_s,
            scales[2] * num_decodes / unit_s,
            scales[3] * num_context_tokens / unit_s,
        ]
        limit = _HUBER_SIGMAS * max(SIGMA_OF_MEDIAN * kind.median, _MIN_SIGMA)
        memory_steps = self._memory_steps if kind.is_good else _MEMORY_WHILE_WRONG
        self._learn(features, residual, limit, memory_steps)
        factor = 1.0 + self._sorted_recent[_JUMP_WINDOW // 2]
        is_jump = factor >= _JUMP_FACTOR or 0.0 < factor <= 1.0 / _JUMP_FACTOR
        if is_jump and self._affects_all_steps(factor):
            self._rescale(factor)
        self.num_steps += 1
        self._is_stale = True

    def _seen_kinds(self) -> list[RecentErrors]:
        return [kind for kind in self._kinds if kind.num_seen]

    def _affects_all_steps(self, factor: float) -> bool:
        """Return whether the speed change affects all recently observed kinds of steps. If not, a
        single coefficient is wrong.
        """
        return all(
            kind.confirms(factor)
            for kind in self._seen_kinds()
            if kind.num_seen >= NUM_LATEST and self.num_steps - kind.last_step <= WINDOW
        )

    def _begin_recent(self) -> None:
        """Reset the window to alternating high and low values, so that a jump needs new values in
        half of it.
        """
        size = SEEDED_SHARE * self._max_error
        self._recent: deque[float] = deque((size, -size) * (_JUMP_WINDOW // 2))
        self._sorted_recent = sorted(self._recent)

    def _note(self, kind: RecentErrors, residual: float) -> None:
        """Add a residual to two windows of recent residuals: the window of its kind of step, and
        the window of all steps.
        """
        kind.note(residual, self.num_steps)
        del self._sorted_recent[bisect_left(self._sorted_recent, self._recent.popleft())]
        self._recent.append(residual)
        insort(self._sorted_recent, residual)

    def _rescale(self, factor: float) -> None:
        """Multiply all coefficients by `factor`, the change of the machine's speed; reduce the
        information and restart the windows of residuals.
        """
        self._coefficients = [
            min(coefficient * factor, MAX_COST_S) for coefficient in self._coefficients
        ]
        fade = 1.0 / (_JUMP_FADE * factor * factor)
        self._information = [[value * fade for value in row] for row in self._information]
        # Repeated jumps would decay unobserved directions to zero and make the matrix singular.
        for index, row in enumerate(self._information):
            row[index] += (1.0 - fade) * _PRIOR_INFORMATION
        self._begin_recent()
        for kind in self._kinds:
            kind.restart()
            kind.is_good = False

    def _learn(self, features: _Row, residual: float, limit: float, memory_steps: float) -> None:
        information, scales = self._information, self._scales
        z0, z1, z2, z3 = features
        shown = [row[0] * z0 + row[1] * z1 + row[2] * z2 + row[3] * z3 for row in information]
        s0, s1, s2, s3 = shown
        weight = limit / max(limit, abs(residual))
        # An outlier adds little information, so little is forgotten for it.
        fade = weight / (memory_steps * (z0 * s0 + z1 * s1 + z2 * s2 + z3 * s3))
        for row, z, s in zip(information, features, shown, strict=True):
            gained, faded = weight * z, fade * s
            row[0] += gained * z0 - faded * s0
            row[1] += gained * z1 - faded * s1
            row[2] += gained * z2 - faded * s2
            row[3] += gained * z3 - faded * s3
        moves = _solved(information, features)
        if moves is None:
            # Rounding made the matrix singular: start again from these coefficients.
            self._information = _prior_information()
            return
        m0, m1, m2, m3 = moves
        # Bounds the change of this step's own prediction.
        leverage = z0 * m0 + z1 * m1 + z2 * m2 + z3 * m3
        pull = min(max(weight * residual, -limit / leverage), limit / leverage)
        scaled = [
            coefficient / scale + pull * move
            for coefficient, scale, move in zip(self._coefficients, scales, moves, strict=True)
        ]
        if min(scaled) < 0.0:
            scaled = _projected(information, scaled)
        self._coefficients = [
            min(max(value * scale, 0.0), MAX_COST_S)
            for value, scale in zip(scaled, scales, strict=True)
        ]


def _coefficients_of(model: CostModel) -> tuple[float, float, float, float]:
    return (model.step_s, model.prefill_token_s, model.decode_slot_s, model.context_token_s)


def _prior_information() -> list[_Row]:
    """Return the initial information matrix, before any step."""
    return [
        [_PRIOR_INFORMATION if row == column else 0.0 for column in range(_NUM_COEFFICIENTS)]
        for row in range(_NUM_COEFFICIENTS)
    ]


def _solved(matrix: list[_Row], right: _Row) -> _Row | None:
    """Solve `matrix` x = `right`; return x, None if the matrix is not positive definite.

    The matrix is symmetric and should be positive definite, so pivoting is not needed. Plain floats
    are used, because with four unknowns they are faster than numpy's calls.
    """
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot, top in enumerate(rows):
        if not top[pivot] > _MIN_PIVOT_SHARE * matrix[pivot][pivot]:
            return None
        inverse = 1.0 / top[pivot]
        for row in rows[pivot + 1 :]:
            factor = row[pivot] * inverse
            if factor:
                for column in range(pivot + 1, size + 1):
                    row[column] -= factor * top[column]
    solution = [0.0] * size
    for pivot in range(size - 1, -1, -1):
        row = rows[pivot]
        value = row[size]
        for column in range(pivot + 1, size):
            value -= row[column] * solution[column]
        solution[pivot] = value / row[pivot]
    return solution


def _projected(information: list[_Row], values: _Row) -> _Row:
    """Return a nearby point without negative values, in the metric of `information`.

    Negative values are set to zero and the others solved again, until none is negative. If one
    value is negative, this is the nearest point; otherwise it is close to it.
    """
    nearest = list(values)
    while min(nearest) < 0.0:
        nearest = [max(value, 0.0) for value in nearest]
        free = [index for index, value in enumerate(nearest) if value > 0.0]
        fixed = [index for index in range(len(values)) if index not in free]
        if not free:
            break
        block = [[information[i][j] for j in free] for i in free]
        right = [sum(information[i][j] * values[j] for j in fixed) for i in free]
        moves = _solved(block, right)
        if moves is None:
            break
        for index, move in zip(free, moves, strict=True):
            nearest[index] = values[index] + move
    return nearest
