"""Fits the cost model to measured steps.

Input: JSON lines, each a `StepMeasure` (token counts and duration of one step). The fit minimises
the squares of the relative residuals, so that long prefills do not dominate decode steps, over
non-negative coefficients. The model has only four coefficients, so each of their 15 non-empty
subsets is fitted, with the other coefficients 0, and the best fit is taken. Steps that took far
longer than predicted (the first steps, pauses of the machine) are excluded and counted: steps whose
excess is above six robust standard deviations (three to six are usual: Huber and Ronchetti, *Robust
Statistics*) and above half the predicted time. Finally all coefficients are scaled so that the
predicted total time of the remaining steps equals the measured total time, because throughput
depends on the total time.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.cost_model import CostModel, StepMeasure
from penstock.scheduler.step_fit import SIGMA_OF_MEDIAN
from penstock.tools.simulation.trace_formats import decoded

_COEFFICIENTS = ("step_s", "prefill_token_s", "decode_slot_s", "context_token_s")
_MAX_MEASURE = 10**12
_NUM_ROUNDS = 12
_MAX_SIGMAS = 6.0
_NEVER_LEFT_OUT = 0.5
"""A step is an outlier only if its relative error is above this, however small the errors of other
steps.
"""


class CalibrationError(ValueError):
    """The steps cannot be parsed or do not determine a cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of a fit: the cost model and its quality.

    Attributes:
        r_squared: Share of the variance of the step times that the cost model explains.
        mean_error: Mean of |predicted - measured|, divided by the mean measured time.
        num_steps: Number of steps fitted.
        num_left_out: Number of excluded outliers.
        left_out_share: The outliers' share of the total time of all steps.
    """

    cost: CostModel
    r_squared: float
    mean_error: float
    num_steps: int
    num_left_out: int = 0
    left_out_share: float = 0.0


def calibrate(path: Path) -> Calibration:
    """Fit the cost model to the steps in a file. Raises CalibrationError, with the line number for
    an invalid line; OSError if the file cannot be read.
    """
    counts, seconds = read_steps(path)
    try:
        return fit_cost(counts, seconds)
    except CalibrationError:
        raise
    except ValueError as error:  # from CostModel, and for steps that do not determine a fit
        raise CalibrationError(f"{path}: no cost model fits these steps: {error}") from error


def read_steps(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the steps in a file: counts [n, 3] (prefill tokens, decode rows, context tokens) and
    durations in seconds [n], float64. Raises CalibrationError and OSError.
    """
    decoder = msgspec.json.Decoder(StepMeasure)
    counts: list[tuple[int, int, int]] = []
    seconds: list[float] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: is not UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step = decoded(decoder, line)
            _check(step)
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: {error}") from error
        counts.append((step.num_prefill_tokens, step.num_decodes, step.num_context_tokens))
        seconds.append(step.seconds)
    return np.array(counts, np.float64).reshape(-1, 3), np.array(seconds)


def _check(step: StepMeasure) -> None:
    """Raise ValueError, naming the field, if one is outside the valid range."""
    for name in ("num_prefill_tokens", "num_decodes", "num_context_tokens"):
        if not 0 <= getattr(step, name) <= _MAX_MEASURE:
            raise ValueError(f"{name} must be in 0 .. {_MAX_MEASURE}")
    if not 0.0 < step.seconds <= _MAX_MEASURE:
        raise ValueError(f"seconds must be positive and at most {_MAX_MEASURE}")


def fit_cost(counts: NDArray[np.float64], seconds: NDArray[np.float64]) -> Calibration:
    """Fit non-negative coefficients as described at the top of this module; arrays as returned by
    `read_steps`.

    Raises CalibrationError for too few steps, ValueError if the result is no valid CostModel.
    """
    num = len(seconds)
    if num < len(_COEFFICIENTS):
        raise CalibrationError(f"{num} steps are too few to fit {len(_COEFFICIENTS)} coefficients")
    columns = np.column_stack((np.ones(num), counts))
    coefficients, is_kept = _robust_fit(columns, seconds)
    left_out_share = float(seconds[~is_kept].sum() / seconds.sum())
    columns, seconds = columns[is_kept], seconds[is_kept]
    coefficients *= seconds.sum() / (columns @ coefficients).sum()
    predicted = columns @ coefficients
    residual = float(((predicted - seconds) ** 2).sum())
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    return Calibration(
        cost=CostModel(**dict(zip(_COEFFICIENTS, coefficients.tolist(), strict=True))),
        r_squared=1.0 - residual / variance if variance else 1.0,
        mean_error=float(np.abs(predicted - seconds).mean() / seconds.mean()),
        num_steps=len(seconds),
        num_left_out=num - len(seconds),
        left_out_share=left_out_share,
    )


def _robust_fit(
    columns: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the coefficients, float64 [4], and for each step whether it was fitted, bool [n].
    Outliers are not fitted.

    Every round minimises the squares of the residuals divided by the times that the previous round
    predicted. The first round divides by the measured times, to reduce the effect of pauses.
    """
    expected = seconds
    is_kept = was_kept = np.ones(len(seconds), dtype=np.bool_)
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_NUM_ROUNDS):
        relative = columns[is_kept] / expected[is_kept, None]
        scales = np.maximum(np.abs(relative).max(axis=0), 1e-300)
        coefficients = (
            _non_negative_fit(relative / scales, seconds[is_kept] / expected[is_kept]) / scales
        )
        # A step with a predicted time of 0 would have infinite weight in the next round.
        expected = np.maximum(columns @ coefficients, 1e-3 * seconds)
        errors = (seconds - expected) / expected
        sigma = SIGMA_OF_MEDIAN * float(np.median(np.abs(errors)))
        was_kept, is_kept = is_kept, errors <= max(_MAX_SIGMAS * sigma, _NEVER_LEFT_OUT)
    return coefficients, was_kept


def _non_negative_fit(
    columns: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    num_columns = columns.shape[1]
    best: list[float] = [0.0] * num_columns
    best_error = math.inf
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            fitted = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
            error = float(((columns[:, chosen] @ fitted - seconds) ** 2).sum())
            if (fitted >= 0.0).all() and error < best_error:
                best_error = error
                coefficients = dict(zip(chosen, fitted.tolist(), strict=True))
                best = [float(coefficients.get(column, 0.0)) for column in range(num_columns)]
    return np.array(best, dtype=np.float64)
