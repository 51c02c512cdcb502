"""Fits the cost model to measured steps.

Owns the file format (JSON lines: n_prefill, n_decode, n_context, seconds) and the fit: least
squares of the relative residuals, so that long prefills do not dominate decode steps, with no
negative coefficient. Four coefficients have sixteen sets of non-zero ones, so the fit tries all of
them instead of an active-set search. Steps that took far longer than predicted (the first ones,
pauses of the machine) are excluded and counted: three to six robust standard deviations are the
usual bound for outliers (Huber and Ronchetti, *Robust Statistics*). Finally all coefficients are
scaled so that the predicted total time of the remaining steps equals the measured one, because
throughput depends on the total.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.cost_model import CostModel

_COUNTS = ("n_prefill", "n_decode", "n_context")
_PRICES = ("step_s", "prefill_token_s", "decode_slot_s", "context_token_s")
_MAX_NUMBER = 1e12
_NUM_ROUNDS = 12
_MAX_SIGMAS = 6.0
_SIGMA_OF_MEDIAN = 1.4826
"""Ratio of the standard deviation of a normal distribution to the median of its absolute values."""
_NEVER_LEFT_OUT = 0.5
"""A step is not an outlier up to this relative error, however small the deviation of the others."""


class CalibrationError(ValueError):
    """The steps cannot be read or do not determine a cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fit. `r_squared`: share of the variance explained; `mean_error`: mean of |predicted -
    measured| over the mean measured time; `num_steps`: number of steps fitted.

    `num_left_out`: number of excluded outliers; `left_out_share`: their share of the total time,
    which the cost model does not include.
    """

    cost: CostModel
    r_squared: float
    mean_error: float
    num_steps: int
    num_left_out: int = 0
    left_out_share: float = 0.0


def calibrate(path: Path) -> Calibration:
    """Fit the cost model to a file's steps. Raises CalibrationError, with the line if known."""
    counts, seconds = read_steps(path)
    try:
        return fit_cost(counts, seconds)
    except CalibrationError:
        raise
    except ValueError as error:  # of the prices, and of steps that no line can be laid through
        raise CalibrationError(f"{path}: no prices fit these steps: {error}") from error


def read_steps(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Read counts [n, 3] (prefill tokens, decode rows, context tokens) and seconds [n], float64."""
    counts: list[tuple[float, ...]] = []
    seconds: list[float] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: is not UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            *step, duration_s = _numbers(line)
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: {error}") from error
        counts.append(tuple(step))
        seconds.append(duration_s)
    return np.array(counts).reshape(-1, len(_COUNTS)), np.array(seconds)


def fit_cost(counts: NDArray[np.float64], seconds: NDArray[np.float64]) -> Calibration:
    """Fit non-negative coefficients with the least relative error; arrays as from `read_steps`."""
    num = len(seconds)
    if num < len(_PRICES):
        raise CalibrationError(f"{num} steps are too few to fit {len(_PRICES)} prices")
    columns = np.column_stack((np.ones(num), counts))
    prices, is_kept = _robust_fit(columns, seconds)
    left_out_share = float(seconds[~is_kept].sum() / seconds.sum())
    columns, seconds = columns[is_kept], seconds[is_kept]
    prices *= seconds.sum() / (columns @ prices).sum()
    predicted = columns @ prices
    residual = float(((predicted - seconds) ** 2).sum())
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    return Calibration(
        cost=CostModel(**dict(zip(_PRICES, prices.tolist(), strict=True))),
        r_squared=1.0 - residual / variance if variance else 1.0,
        mean_error=float(np.abs(predicted - seconds).mean() / seconds.mean()),
        num_steps=len(seconds),
        num_left_out=num - len(seconds),
        left_out_share=left_out_share,
    )


def _robust_fit(
    columns: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the coefficients float64 [4], and which steps were fitted, bool [n].

    Each round weighs steps by the prediction of the previous round; the first round by the measured
    time, which reduces the weight of pauses.
    """
    expected = seconds
    is_kept = was_kept = np.ones(len(seconds), dtype=np.bool_)
    prices = np.zeros(columns.shape[1])
    for _ in range(_NUM_ROUNDS):
        relative = columns[is_kept] / expected[is_kept, None]
        scales = np.maximum(np.abs(relative).max(axis=0), 1e-300)
        prices = _non_negative_fit(relative / scales, seconds[is_kept] / expected[is_kept]) / scales
        # A step with a predicted time of 0 would have infinite weight in the next round.
        expected = np.maximum(columns @ prices, 1e-3 * seconds)
        errors = (seconds - expected) / expected
        sigma = _SIGMA_OF_MEDIAN * float(np.median(np.abs(errors)))
        was_kept, is_kept = is_kept, errors <= max(_MAX_SIGMAS * sigma, _NEVER_LEFT_OUT)
    return prices, was_kept


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
                prices = dict(zip(chosen, fitted.tolist(), strict=True))
                best = [float(prices.get(column, 0.0)) for column in range(num_columns)]
    return np.array(best, dtype=np.float64)


def _numbers(line: str) -> list[float]:
    try:
        document: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: it is nested too deep") from None
    if not isinstance(document, dict):
        raise ValueError("must be a JSON object")
    values = cast("dict[str, object]", document)
    numbers: list[float] = []
    for name in (*_COUNTS, "seconds"):
        value = values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number, not {value!r}")
        # Compared before the conversion: an integer may be too large for a float.
        if not 0 <= value < math.inf or value > _MAX_NUMBER:
            raise ValueError(f"{name} must be finite and not negative, at most {_MAX_NUMBER:g}")
        numbers.append(float(value))
    if not numbers[-1] > 0.0:
        raise ValueError("seconds must be positive")
    return numbers
