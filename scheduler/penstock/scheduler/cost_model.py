"""Defines the cost model of a step, and the error of its predictions. The cost is linear in the
step's numbers of tokens and rows.

Contains the formula, the measurement of a step (input of the fit), and the lower bound of a
predicted time given recent errors.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from penstock.scheduler.batch import Batch
from penstock.scheduler.setting import check, setting

MAX_COST_S = 3600.0
"""Upper bound of a coefficient; a larger one is a mistake in the units."""


class StepCost(Protocol):
    """The four coefficients of the cost model: fixed, or fitted at run time.

    All are seconds, finite and not negative; see `CostModel`.
    """

    @property
    def step_s(self) -> float:
        """Fixed cost of a step, seconds."""
        ...

    @property
    def prefill_token_s(self) -> float:
        """Cost of each prefill token computed, seconds."""
        ...

    @property
    def decode_slot_s(self) -> float:
        """Cost of each decode row, seconds."""
        ...

    @property
    def context_token_s(self) -> float:
        """Cost of each token of context that a row attends to, seconds."""
        ...

    def step_time_s(
        self, *, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """Return the predicted seconds of a step; `num_context_tokens` is the sum over all rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one step: a constant plus a cost for each kind of work in it.

    Raises SettingError naming a field that is out of bounds.
    """

    step_s: float = setting(0.004, text="seconds of any step", at_least=0, at_most=MAX_COST_S)
    prefill_token_s: float = setting(
        20e-6, text="seconds of each prefill token computed", at_least=0, at_most=MAX_COST_S
    )
    decode_slot_s: float = setting(
        50e-6, text="seconds of each decode row", at_least=0, at_most=MAX_COST_S
    )
    context_token_s: float = setting(
        20e-9,
        text="seconds of each token of context that a row attends to (its position at the end of"
        " the step)",
        at_least=0,
        at_most=MAX_COST_S,
    )

    def __post_init__(self) -> None:
        check(self)

    def step_time_s(
        self, *, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """Return the predicted seconds of a step; `num_context_tokens` is the sum over all rows."""
        return (
            self.step_s
            + self.prefill_token_s * num_prefill_tokens
            + self.decode_slot_s * num_decodes
            + self.context_token_s * num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """A measured step: the numbers of tokens and decodes, as in `CostModel.step_time_s`, and the
    duration in seconds.

    A step launched while another one ran is measured from the end of that one.
    """

    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    seconds: float


def measure_of(batch: Batch, seconds: float) -> StepMeasure:
    """Return the measurement of a batch that took `seconds`."""
    num_prefill_tokens = int(batch.num_tokens[batch.num_decodes :].sum())
    return StepMeasure(
        num_prefill_tokens=num_prefill_tokens,
        num_decodes=batch.num_decodes,
        num_context_tokens=int(batch.starts.sum()) + batch.num_decodes + num_prefill_tokens,
        seconds=seconds,
    )


_MAX_SUBTRACTED_ERROR = 0.9
"""Limit of the subtracted error, so that the minimum time of a request stays above zero."""
WINDOW = 64
"""Number of residuals in the window of recent errors."""
NUM_LATEST = 8
"""Number of latest steps of each kind that must confirm a change of the machine's speed."""
NUM_SEEDED = 16
SEEDED_SHARE = 0.9
"""The window of recent errors starts with NUM_SEEDED errors of this share of the maximum error, so
that a few outliers among the first steps do not move the median above the maximum.
"""
_REGAINED_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """Relative error of the predicted step times.

    `bias`: the average relative excess of measured over predicted time, with the excess of each
    step limited to 1. `p90`: the 90th percentile of the magnitude of the relative error of a single
    step. Raises ValueError naming the invalid field.
    """

    bias: float = 0.0
    p90: float = 0.0

    def __post_init__(self) -> None:
        if not -1.0 < self.bias < math.inf:
            raise ValueError(f"bias must be finite and above -1, not {self.bias}")
        if not self.p90 >= 0.0:
            raise ValueError(f"p90 must not be negative, not {self.p90}")

    @property
    def mean(self) -> float:
        """The average ratio of measured to predicted time."""
        return 1.0 + self.bias

    def remaining_share(self, num_steps: float) -> float:
        """Return the fraction of the predicted time of `num_steps` steps that remains after
        subtracting the error.

        The error is `p90` / sqrt(min(`num_steps`, `WINDOW`)): the errors of many steps average out,
        but the bias is estimated from only `WINDOW` steps.
        """
        if math.isinf(self.p90):
            return 0.0
        error = self.p90 / math.sqrt(min(max(num_steps, 1.0), WINDOW))
        return 1.0 - min(error, _MAX_SUBTRACTED_ERROR)


EXACT = StepError()
UNKNOWN_ERROR = StepError(p90=math.inf)
"""The error while steps cannot be predicted: no request is rejected because of their duration."""


class RecentErrors:
    """Relative errors of recent steps of one kind (with prefill or without).

    `is_good`: whether the median magnitude is at most `max_error`; when it was larger, it must
    first fall to 0.8 `max_error`. `last_step`: the number of the last recorded step.
    """

    __slots__ = ("_max_error", "_residuals", "_sorted", "is_good", "last_step", "num_seen")

    def __init__(self, max_error: float) -> None:
        self._max_error = max_error
        self.is_good = True
        self.restart()

    def restart(self) -> None:
        """Discard the recorded errors; `is_good` does not change until enough new steps were
        recorded.
        """
        size = SEEDED_SHARE * self._max_error
        self._residuals: deque[float] = deque((size,) * NUM_SEEDED)
        self._sorted = [size] * NUM_SEEDED
        self.num_seen = 0
        self.last_step = 0

    def note(self, residual: float, step: int) -> None:
        """Record the relative error of step number `step`, and update `is_good`."""
        if self.num_seen < NUM_SEEDED or len(self._residuals) == WINDOW:
            del self._sorted[bisect_left(self._sorted, abs(self._residuals.popleft()))]
        self._residuals.append(residual)
        insort(self._sorted, abs(residual))
        self.num_seen += 1
        self.last_step = step
        bound = self._max_error * (1.0 if self.is_good else _REGAINED_SHARE)
        self.is_good = self.median <= bound

    @property
    def median(self) -> float:
        """Median magnitude of the relative errors."""
        return self._sorted[len(self._sorted) // 2]

    @property
    def p90(self) -> float:
        """90th percentile of the magnitudes of the relative errors."""
        return self._sorted[(len(self._sorted) * 9) // 10]

    @property
    def bias(self) -> float:
        """Mean of the recorded errors; 0 before `NUM_LATEST` errors were recorded.

        A step that took more than twice its predicted time counts as twice that time: a long pause
        is an outlier.
        """
        num_real = min(self.num_seen, len(self._residuals))
        if num_real < NUM_LATEST:
            return 0.0
        return sum(min(one, 1.0) for one in islice(reversed(self._residuals), num_real)) / num_real

    def confirms(self, factor: float) -> bool:
        """Return whether the latest steps confirm that the machine's speed changed by `factor`:
        their median error has the sign of `factor` - 1 and at least half its magnitude.
        """
        latest = sorted(islice(reversed(self._residuals), NUM_LATEST))
        change = latest[len(latest) // 2]
        return change * (factor - 1.0) > 0.0 and abs(change) >= abs(factor - 1.0) / 2.0
