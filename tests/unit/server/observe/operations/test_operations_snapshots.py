"""Records, heartbeats and steps are combined into a snapshot."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.server.observe.frames import Heartbeat, OutcomeCount
from penstock.server.observe.operations.snapshots import SnapshotMaker
from support import reports
from support.core import FakeClock
from support.reports import engine_hello, outcome, request_record, steps_at


def heartbeat(front_id: int, *outcomes: OutcomeCount, **changes: Any) -> Heartbeat:
    return reports.heartbeat(front_id, *outcomes, **{"num_streams": 2, "num_live": 2, **changes})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def maker(clock: FakeClock) -> SnapshotMaker:
    maker = SnapshotMaker(
        "tiny",
        max_num_batched_tokens=2048,
        started_s=900.0,
        clock=clock,
        unix_clock=lambda: 5e8,
    )
    maker.set_engine(engine_hello(num_blocks=100))
    return maker


def model_of(maker: SnapshotMaker) -> Any:
    (model,) = maker.snapshot().models
    return model


def test_before_any_frame(maker: SnapshotMaker) -> None:
    snapshot = maker.snapshot()
    (model,) = snapshot.models

    assert (snapshot.time_s, snapshot.uptime_s, snapshot.is_draining) == (5e8, 100.0, False)
    assert (model.model, model.is_up, model.epoch, model.num_engine_restarts) == (
        "tiny",
        False,
        0,
        0,
    )
    assert model.cache.num_free_blocks == model.cache.num_total_blocks == 100
    assert (model.mean_step_s, model.estimated_queue_s, model.itl.p50_s) == (None, None, None)
    assert snapshot.fronts == ()


def test_steps_contain_load_and_speed(maker: SnapshotMaker) -> None:
    rows = steps_at(
        100,
        lambda index: 990.0 + index * 0.1,
        num_tokens=4,
        num_prefill_tokens=10,
        itl_s=0.1,
        num_itl=4,
        num_running=4,
        num_waiting=2,
        waits_for=2,
        num_used_blocks=30,
        num_cached_blocks=20,
        num_free_blocks=50,
        num_preempted=1,
    )
    maker.add_steps(1, rows, 7)
    model = model_of(maker)

    assert model.decode_tokens_per_s == pytest.approx(40.0, rel=0.05)
    assert model.prefill_tokens_per_s == pytest.approx(100.0, rel=0.05)
    assert model.mean_step_s == pytest.approx(0.01)
    assert model.itl.p99_s == pytest.approx(0.1, rel=0.011)
    assert model.itl.num == 400
    assert (model.num_processing, model.num_pending, model.waits_for) == (4, 2, "SLOTS")
    assert (model.num_steps, model.num_completion_tokens, model.num_preemptions) == (107, 400, 100)
    assert (model.cache.num_used_blocks, model.cache.num_cached_blocks) == (30, 20)
    assert model.cache.num_total_blocks == 100


def test_steps_in_flight_together_do_not_count_their_time_twice(maker: SnapshotMaker) -> None:
    rows = steps_at(10, lambda index: 999.0 + index * 0.004)  # each takes 10 ms
    maker.add_steps(1, rows[:5], 0)
    maker.add_steps(1, rows[5:], 0)

    assert model_of(maker).mean_step_s == pytest.approx((0.01 + 9 * 0.004) / 10)


def test_records_contain_the_latencies_that_apply(maker: SnapshotMaker) -> None:
    rejected = request_record(
        2, num_ahead=-1, ttft_s=math.nan, segments=(), num_prompt_tokens=500, num_cached_tokens=0
    )
    maker.add_records([request_record(1, arrival_s=997.0), rejected])
    model = model_of(maker)

    assert (model.ttft.num, model.queue.num, model.total.num) == (1, 1, 1)
    assert model.ttft.p50_s == pytest.approx(0.7, rel=0.011)
    assert model.queue.p50_s == pytest.approx(0.5, rel=0.011)
    assert model.total.p50_s == pytest.approx(2.0, rel=0.011)
    assert (model.num_prompt_tokens, model.num_cached_prompt_tokens) == (96, 32)


def queue_up(maker: SnapshotMaker, num_waiting: int, num_running: int = 8) -> None:
    rows = steps_at(1, lambda _: 999.9, num_running=num_running, num_waiting=num_waiting)
    maker.add_steps(1, rows, 0)


def test_the_wait_is_what_was_predicted_for_the_newest_in_the_queue(
    maker: SnapshotMaker, clock: FakeClock
) -> None:
    """The recently ended requests arrived at an empty queue, so their estimates do not apply to the
    current one.
    """
    queue_up(maker, num_waiting=40)
    maker.add_heartbeat(heartbeat(1, queue_estimate_s=9.9, queue_estimate_at_s=999.5))
    maker.add_heartbeat(heartbeat(2, queue_estimate_s=2.0, queue_estimate_at_s=990.5))
    maker.add_records([request_record(1, arrival_s=999.0, estimated_queue_s=0.0)])
    assert model_of(maker).estimated_queue_s == pytest.approx(9.4)

    clock.now_s = 1003.0
    assert model_of(maker).estimated_queue_s == pytest.approx(6.4), "others were served meanwhile"
    maker.add_heartbeat(heartbeat(2, queue_estimate_s=20.0, queue_estimate_at_s=1002.0))
    assert model_of(maker).estimated_queue_s == pytest.approx(19.0)
    maker.front_disconnected(2)
    assert model_of(maker).estimated_queue_s == pytest.approx(6.4)


@pytest.mark.parametrize(
    ("estimate_s", "at_s"), [(None, 999.9), (30.0, 989.9), (0.0, 999.9), (0.5, 999.0)]
)
def test_an_unknown_wait_is_not_reported(
    maker: SnapshotMaker, estimate_s: float | None, at_s: float
) -> None:
    """No wait was predicted, the prediction is too old, or the predicted wait is over although
    requests still wait.
    """
    queue_up(maker, num_waiting=1)
    maker.add_heartbeat(heartbeat(1, queue_estimate_s=estimate_s, queue_estimate_at_s=at_s))
    assert model_of(maker).estimated_queue_s is None


def test_no_request_waits_where_there_is_no_queue_and_a_slot(maker: SnapshotMaker) -> None:
    reported = heartbeat(1, queue_estimate_s=9.9, queue_estimate_at_s=999.5)
    maker.add_heartbeat(reported)
    queue_up(maker, num_waiting=0, num_running=7)
    assert model_of(maker).estimated_queue_s == 0.0
    queue_up(maker, num_waiting=0, num_running=8)
    assert model_of(maker).estimated_queue_s is None
    maker.add_heartbeat(heartbeat(1, is_engine_up=False))
    assert model_of(maker).estimated_queue_s is None


def test_outcomes_are_sorted_into_their_kinds(maker: SnapshotMaker) -> None:
    maker.add_heartbeat(
        heartbeat(
            1,
            outcome(10),
            outcome(2, finish_reason="CANCELLED"),
            outcome(3, code=1, finish_reason=""),
            outcome(4, code=8, reason="QUEUE_FULL", finish_reason=""),
            outcome(5, code=4, reason="DEADLINE_EXCEEDED", finish_reason=""),
            num_submitted=30,
        )
    )
    model = model_of(maker)

    assert (model.num_completed, model.num_cancelled) == (15, 5)
    assert (model.num_rejected, model.num_failed, model.num_accepted) == (4, 5, 30)


def test_a_front_that_died_keeps_its_counts_and_loses_its_gauges(maker: SnapshotMaker) -> None:
    maker.add_heartbeat(heartbeat(1, outcome(10), num_submitted=12))
    maker.add_heartbeat(heartbeat(2, outcome(1), num_submitted=1))
    maker.front_disconnected(1)
    assert [front.index for front in maker.snapshot().fronts] == [2]
    assert model_of(maker).num_completed == 11

    maker.add_heartbeat(heartbeat(1, outcome(5), num_submitted=5, pid=777))
    assert [front.pid for front in maker.snapshot().fronts] == [777, 102]
    assert (model_of(maker).num_completed, model_of(maker).num_accepted) == (16, 18)


def test_a_front_that_reconnects_counts_once(maker: SnapshotMaker) -> None:
    maker.add_heartbeat(heartbeat(1, outcome(10)))
    maker.front_disconnected(1)
    maker.add_heartbeat(heartbeat(1, outcome(11)))

    assert model_of(maker).num_completed == 11


def test_counts_of_many_front_processes_are_summed_in_bounded_memory(maker: SnapshotMaker) -> None:
    for pid in range(2000):
        maker.add_heartbeat(heartbeat(1, outcome(1), pid=pid))
        maker.front_disconnected(1)

    assert model_of(maker).num_completed == 2000
    assert len(maker._fronts._heartbeats) < 300


def test_an_engine_that_is_down_has_no_running_requests(maker: SnapshotMaker) -> None:
    maker.add_heartbeat(heartbeat(1, epoch=1))
    maker.add_steps(1, steps_at(1, lambda _: 999.9, num_running=4, num_used_blocks=9), 0)
    assert (model_of(maker).is_up, model_of(maker).num_processing) == (True, 4)

    maker.add_heartbeat(heartbeat(1, epoch=1, is_engine_up=False))
    model = model_of(maker)
    assert (model.is_up, model.num_processing, model.cache.num_used_blocks) == (False, 0, 0)

    maker.add_heartbeat(heartbeat(1, epoch=2))
    maker.add_steps(2, steps_at(1, lambda _: 999.9, num_running=3), 0)
    maker.add_steps(1, steps_at(1, lambda _: 999.8, num_running=7), 0)  # the old one's last
    model = model_of(maker)
    assert (model.epoch, model.num_engine_restarts, model.num_processing) == (2, 1, 3)


def test_no_request_is_reported_to_run_when_no_front_has_one(
    maker: SnapshotMaker, clock: FakeClock
) -> None:
    maker.add_steps(
        1, steps_at(1, lambda _: 1000.0, num_running=4, num_used_blocks=9, num_free_blocks=1), 0
    )
    maker.add_heartbeat(heartbeat(1, num_live=0))  # as young as the step: it may not have received
    assert model_of(maker).num_processing == 4
    clock.now_s = 1002.0
    maker.add_heartbeat(heartbeat(1, num_live=0))
    model = model_of(maker)
    assert (model.num_processing, model.cache.num_used_blocks) == (0, 0)
    assert model.cache.num_total_blocks == 10


def test_a_drain_is_reported_at_once_and_stays(maker: SnapshotMaker) -> None:
    maker.begin_drain()
    maker.add_heartbeat(heartbeat(1, is_draining=False))
    assert maker.snapshot().is_draining


def test_a_drain_is_received_from_the_fronts(maker: SnapshotMaker) -> None:
    maker.add_heartbeat(heartbeat(1, is_draining=True))
    assert maker.snapshot().is_draining


def test_a_front_that_is_replaced_is_no_drain(maker: SnapshotMaker) -> None:
    maker.add_heartbeat(heartbeat(1, is_draining=True))
    maker.add_heartbeat(heartbeat(2, is_draining=False))
    assert not maker.snapshot().is_draining
    maker.front_disconnected(1)
    assert not maker.snapshot().is_draining
