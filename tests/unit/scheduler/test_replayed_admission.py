"""A request that was admitted once is admitted again, whatever the state of the queue and the
forecasts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed
from penstock.scheduler.request import FailureReason, RequestSpec
from support.core import FakeClock, make_engine, make_spec


def spec(key: int, **settings: Any) -> RequestSpec:
    return replace(make_spec(key, list(range(1, 9)), hashed=False), **settings)


def engine(clock: FakeClock, **settings: Any) -> Engine:
    return make_engine(clock=clock, max_num_seqs=1, max_num_batched_tokens=2048, **settings)[0]


def rejections(one: Engine) -> dict[int, FailureReason]:
    return {end.key: end.reason for end in one.step().ends if isinstance(end, Failed)}


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"max_num_waiting": 2}, FailureReason.QUEUE_FULL),
        ({"max_num_waiting_tokens": 16}, FailureReason.QUEUE_FULL),
        ({"max_num_waiting_per_tenant": 2}, FailureReason.TENANT_OVER_QUOTA),
    ],
)
def test_bounds_of_the_queue_do_not_hold_for_replays(
    bounds: dict[str, int], reason: FailureReason
) -> None:
    one = engine(FakeClock(), **bounds)
    for key in range(1, 5):
        one.submit((spec(key),))
    one.submit((spec(9, num_replays=1),))
    reported = rejections(one)
    assert set(reported.values()) == {reason}
    assert 9 not in reported


def test_a_deadline_that_has_passed_ends_a_replay() -> None:
    clock = FakeClock()
    clock.now_s = 10.0
    one = engine(clock)
    one.submit((spec(1, num_replays=3, deadline_s=9.0),))
    assert rejections(one) == {1: FailureReason.DEADLINE_EXCEEDED}


def test_an_id_in_use_and_a_size_that_never_fits_are_rejected_for_replays() -> None:
    one = engine(FakeClock())
    one.submit((spec(1),))
    one.submit((spec(2, num_replays=1, request_id="request-1"),))
    one.submit((spec(3, num_replays=1, max_tokens=1000),))
    assert rejections(one) == {
        2: FailureReason.REQUEST_ID_IN_USE,
        3: FailureReason.PROMPT_TOO_LONG,
    }


def test_a_negative_number_of_replays_is_rejected() -> None:
    with pytest.raises(ValueError, match="num_replays"):
        spec(1, num_replays=-1)
