"""Fits the cost model to steps that were really run.

Owns the file format (JSON lines: n_prefill, n_decode, n_context, seconds) and the fit: least
squares under the condition that no price is negative. Four prices have sixteen sets of which are
not zero, so the best one is found by trying them all instead of by an active-set search.
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


class CalibrationError(ValueError):
    """The steps cannot be read or do not determine a cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fit. `r_squared`: share of the variance explained; `mean_error`: mean of |predicted -
    measured| over the mean measured time; `num_steps`: what it was fitted to.
    """

    cost: CostModel
    r_squared: float
    mean_error: float
    num_steps: int


def calibrate(path: Path) -> Calibration:
    """Fit the steps of a file. Raises CalibrationError, with a line number where there is one."""
    counts, seconds = read_steps(path)
    return fit_cost(counts, seconds)


def read_steps(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Counts float64 [n, 3] (prefill tokens, decode rows, context tokens), seconds float64 [n]."""
    counts: list[tuple[float, ...]] = []
    seconds: list[float] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
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
    """The prices of least squared error, none negative; arrays as `read_steps` returns them."""
    num = len(seconds)
    if num < len(_PRICES):
        raise CalibrationError(f"{num} steps are too few to fit {len(_PRICES)} prices")
    columns = np.column_stack((np.ones(num), counts))
    scales = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    prices = _non_negative_fit(columns / scales, seconds) / scales
    predicted = columns @ prices
    residual = float(((predicted - seconds) ** 2).sum())
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    return Calibration(
        cost=CostModel(**dict(zip(_PRICES, prices.tolist(), strict=True))),
        r_squared=1.0 - residual / variance if variance else 1.0,
        mean_error=float(np.abs(predicted - seconds).mean() / seconds.mean()),
        num_steps=num,
    )


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
    if not isinstance(document, dict):
        raise ValueError("must be a JSON object")
    values = cast("dict[str, object]", document)
    numbers: list[float] = []
    for name in (*_COUNTS, "seconds"):
        value = values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number, not {value!r}")
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be finite and not negative, not {value}")
        numbers.append(float(value))
    if not numbers[-1] > 0.0:
        raise ValueError("seconds must be positive")
    return numbers
