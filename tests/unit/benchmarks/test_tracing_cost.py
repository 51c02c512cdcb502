"""What is made of the turns of the tracing benchmark: differences within a round, and checks."""

import importlib
import math
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def cost() -> Any:
    return importlib.import_module("tracing_cost")


@pytest.fixture
def path() -> Any:
    module: Any = importlib.import_module("tracing_record_path")
    parts = dict.fromkeys(("begin", "describe", "close", "flush", "metadata"), 1.0)
    return module.RecordPath(watched=9.0, unwatched=1.0, added=8.0, **parts)


def turn(cost: Any, loop_us: float, *, per_s: float = 100.0, lag_ms: float = 1.0) -> Any:
    return cost.Turn(
        per_s=per_s,
        front_us=loop_us + 50.0,
        loop_us=loop_us,
        first_p99_ms=5.0,
        foreign_cores=0.0,
        lags_ms=np.full(100, lag_ms),
    )


def rounds_of(cost: Any, base: list[Any], traced: list[Any]) -> Any:
    sides = {cost.OFF: base} | dict.fromkeys((cost.UP, cost.DEAD, cost.HANGING), traced)
    return cost.Rounds(rate_per_s=100.0, at_rate=sides, at_most=sides)


def test_a_side_is_set_against_its_base_round_by_round(cost: Any) -> None:
    # The machine is slower in the second round; what tracing adds is not.
    base = [turn(cost, us) for us in (100.0, 200.0, 110.0)]
    traced = [turn(cost, us) for us in (108.0, 206.0, 117.0)]
    rounds = rounds_of(cost, base, traced)
    assert rounds.added(cost.UP, lambda t: t.loop_us) == pytest.approx(7.0)
    assert rounds.error(cost.UP, lambda t: t.loop_us) == pytest.approx(1.0 / math.sqrt(3))
    assert rounds.median(cost.UP, lambda t: t.loop_us) == 117.0


@pytest.mark.parametrize(
    ("changes", "num_missed"),
    [({}, 0), ({"loop_us": 115.0}, 1), ({"per_s": 97.0}, 6), ({"lag_ms": 3.5}, 3)],
)
def test_every_goal_can_be_missed(
    cost: Any, path: Any, changes: dict[str, float], num_missed: int
) -> None:
    base = [turn(cost, 100.0)] * 3
    rounds = rounds_of(cost, base, [turn(cost, **{"loop_us": 105.0, **changes})] * 3)
    checks = cost.checks_of(rounds, path)
    assert len(checks) == 11
    assert sum(not check.holds for check in checks) == num_missed


def test_a_row_has_as_many_values_as_columns_and_keys(cost: Any) -> None:
    turns = [turn(cost, 100.0), turn(cost, 101.0)]
    (row, *_) = cost.rows_of(rounds_of(cost, turns, turns))
    assert len(row) == len(cost.HEADER) == len(cost._KEYS)
