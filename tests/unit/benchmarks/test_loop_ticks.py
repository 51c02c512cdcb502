"""The ticker within a loop and its reader: ticks only when they are wanted, lateness as it was."""

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def ticks() -> Any:
    return importlib.import_module("loop_ticks")


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def all_ms(reader: Any) -> list[float]:
    lags: np.ndarray[Any, Any] = reader.lags_ms(1.0, np.inf)
    return [round(lag_ms, 3) for lag_ms in lags.tolist()]


async def test_a_blocked_loop_is_one_late_tick(ticks: Any, tmp_path: Path) -> None:
    clock = Clock()
    ticker = ticks.Ticker(tmp_path, clock)
    reader = ticks.TickReader(tmp_path, os.getpid())
    reader.switch(is_on=True)
    ticker.start()
    # Due at 100.005; the loop itself does not run in between.
    for now_s in (100.005, 100.011, 100.300, 100.301):
        clock.now_s = now_s
        ticker._tick()
    assert all_ms(reader) == [0.0, 1.0, 285.0, 1.0]


async def test_there_are_no_ticks_that_nobody_wants(ticks: Any, tmp_path: Path) -> None:
    clock = Clock()
    ticker = ticks.Ticker(tmp_path, clock)
    reader = ticks.TickReader(tmp_path, os.getpid())
    ticker.start()
    clock.now_s += 0.1
    ticker._tick()
    assert all_ms(reader) == []
    reader.switch(is_on=True)
    clock.now_s += 0.1
    ticker._tick()
    assert len(all_ms(reader)) == 1


async def test_lags_are_of_the_time_that_is_asked_for(ticks: Any, tmp_path: Path) -> None:
    ticks.Ticker(tmp_path)
    reader = ticks.TickReader(tmp_path, os.getpid())
    reader._ticks[:3] = [[10.0, 0.001], [11.0, 0.002], [12.0, 0.003]]
    assert reader.lags_ms(11.0, 12.0).tolist() == [2.0]


def test_a_process_without_ticks_has_no_reader(ticks: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ticks.TickReader(tmp_path, 1)
