"""The load that is reported to the gateway. It consists of figures of the engine's status board,
the rate of output tokens between two readings, and the share of cached prompt tokens.
"""

from __future__ import annotations

from typing import cast

import pytest

from penstock.gateway.smg.loads import LoadReport
from penstock.server.front.events import Usage
from penstock.server.ipc.board import BoardView, LoadState
from support.fronts import INFO


class PublishedLoad:
    """The engine's published load, which the test sets."""

    def __init__(self) -> None:
        self.load = LoadState(
            epoch=1,
            num_running=3,
            num_waiting=2,
            num_waiting_tokens=50,
            num_used_blocks=16,
            num_output_tokens=0,
        )

    def make(self, num_tokens: int, epoch: int = 1) -> None:
        self.load = LoadState(
            epoch=epoch,
            num_running=3,
            num_waiting=2,
            num_waiting_tokens=50,
            num_used_blocks=16,
            num_output_tokens=num_tokens,
        )


class Harness:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.show = PublishedLoad()
        self.report = LoadReport(cast("BoardView", self.show), lambda: self.now_s)

    def speed(self, num_tokens: int, after_s: float, epoch: int = 1) -> float:
        self.now_s += after_s
        self.show.make(num_tokens, epoch)
        return self.report.load(INFO).output_tokens_per_s


def test_used_blocks_are_reported_in_tokens() -> None:
    load = Harness().report.load(INFO)

    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (3, 2, 50)
    assert (load.num_used_tokens, load.num_total_tokens) == (16 * 16, 64 * 16)
    assert load.usage == 0.25
    assert load.max_num_running == 8


def test_speed_is_of_the_last_seconds() -> None:
    harness = Harness()

    assert harness.speed(0, 0) == 0.0
    assert harness.speed(50, 0.5) == 0.0  # too soon to compute
    assert harness.speed(200, 1.5) == 100.0
    assert harness.speed(200, 2.0) == 50.0
    assert harness.speed(200, 8.0) == pytest.approx(0.0)  # nothing for ten seconds
    assert harness.speed(260, 2.0) == pytest.approx(6.0)


def test_another_engine_counts_from_the_start() -> None:
    harness = Harness()
    harness.speed(5_000, 0)
    harness.speed(6_000, 2.0)

    assert harness.speed(10, 2.0, epoch=2) == 0.0
    assert harness.speed(110, 1.0, epoch=2) == 100.0


def test_the_share_of_cached_tokens_is_that_of_requests_that_ended() -> None:
    harness = Harness()
    assert harness.report.load(INFO).cache_hit_share == 0.0

    for num_cached in (0, 80):
        harness.report.record_usage(
            Usage(
                num_prompt_tokens=100, num_completion_tokens=1, num_cached_prompt_tokens=num_cached
            )
        )

    assert harness.report.load(INFO).cache_hit_share == 0.4


def test_an_engine_that_shows_nothing_is_reported_as_idle() -> None:
    load = LoadReport(None, lambda: 0.0).load(INFO)

    assert (load.num_running, load.num_waiting, load.usage) == (0, 0, 0.0)
    assert load.max_num_running == 8
