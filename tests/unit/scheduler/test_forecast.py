"""Forecasts are compared with results that were computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.scheduler.cost_model import UNKNOWN_ERROR, CostModel, StepError
from penstock.scheduler.forecast import (
    Deadlines,
    Demand,
    Forecast,
    MachineModel,
    QueuedAhead,
    RunningLoad,
    _expected_queue,
    forecast,
    forecast_alone,
    latest_admission_s,
    prefill_alone_s,
    retry_after_s,
)
from penstock.scheduler.request import NO_TIME

COST = CostModel(step_s=1.0, prefill_token_s=0.01, decode_slot_s=0.1, context_token_s=0.001)
MACHINE = MachineModel(cost=COST, max_prefill_tokens=100)
IDLE = RunningLoad(num_free_slots=8, num_free_blocks=1000)
NO_TENANT = QueuedAhead()


def can_meet(
    predicted: Forecast,
    now: float,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
) -> bool:
    return Deadlines(ttft_s=ttft_deadline_s, total_s=deadline_s).are_met(predicted, now)


def test_the_time_of_prefill_alone_is_the_cost_of_steps_tokens_and_context() -> None:
    # Three steps of 50, 150 and 250 tokens in sight.
    alone_s = prefill_alone_s(MACHINE, Demand(num_prefill_tokens=250))

    assert alone_s == pytest.approx(3 * 1.0 + 250 * 0.01 + (50 + 150 + 250) * 0.001)


def test_every_chunk_attends_to_the_cached_prefix() -> None:
    alone_s = prefill_alone_s(MACHINE, Demand(num_prefill_tokens=200, num_cached_tokens=64))

    assert alone_s == pytest.approx(2 * 1.0 + 2.0 + (100 + 200 + 2 * 64) * 0.001)


def test_an_idle_machine_has_no_queue() -> None:
    want = Demand(num_prefill_tokens=50)

    reported = [forecast(MACHINE, want, IDLE, NO_TENANT), forecast_alone(MACHINE, want)]

    assert [outlook.queue_s for outlook in reported] == [0.0, 0.0]
    assert [outlook.ttft_s for outlook in reported] == pytest.approx([1.55] * 2)


def test_forecasts_are_reduced_by_the_error_of_the_cost() -> None:
    errors = [
        StepError(bias=0.2),
        StepError(bias=-0.2),
        StepError(p90=0.3),
        StepError(p90=50.0),
        UNKNOWN_ERROR,
    ]
    want = Demand(num_prefill_tokens=50)

    reported = [
        forecast_alone(MachineModel(cost=COST, max_prefill_tokens=100, prefill_error=error), want)
        for error in errors
    ]

    assert [outlook.ttft_s / 1.55 for outlook in reported] == pytest.approx(
        [1.0, 0.8, 0.7, 0.1, 0.0]
    )


def test_errors_of_many_steps_cancel_out() -> None:
    error = StepError(bias=0.5, p90=0.4)
    machine = MachineModel(cost=COST, max_prefill_tokens=100, decode_error=error)

    def reported(num_tokens: int) -> float:
        want = Demand(num_prefill_tokens=50, min_output_tokens=num_tokens)
        return forecast_alone(machine, want).decode_s

    step_s = reported(2) / (1.0 - 0.4)
    assert reported(17) == pytest.approx(16 * step_s * (1.0 - 0.1))
    assert reported(1001) == pytest.approx(1000 * step_s * (1.0 - 0.05)), "of as many as were seen"


def test_the_forecast_wait_is_reduced_by_the_error_of_its_steps() -> None:
    machine = MachineModel(
        cost=COST,
        max_prefill_tokens=100,
        prefill_error=StepError(p90=0.2),
        decode_error=StepError(p90=0.4),
    )
    want = Demand(num_prefill_tokens=50)
    full = RunningLoad(num_running=4, num_decodes=4, num_output_tokens=400.0)
    roomy = replace(full, num_free_slots=9, num_free_blocks=99)
    places = forecast(machine, want, full, QueuedAhead(num_requests=1))
    prompts = forecast(machine, want, roomy, QueuedAhead(num_requests=1, num_prefill_tokens=1000))

    # Two must end, one every 25 steps; ten steps of prompts; half a step each.
    assert places.queue_left == pytest.approx(1.0 - 0.4 / math.sqrt(50.5))
    assert prompts.queue_left == pytest.approx(1.0 - 0.2 / math.sqrt(10.5))
    assert (places.prefill_left, prompts.prefill_left) == pytest.approx((0.8, 0.8))


TEN = RunningLoad(
    num_running=10,
    num_decodes=10,
    num_output_tokens=500.0,
    num_free_blocks=1000,
    num_used_blocks=100,
)
"""Each of ten outputs has 50 tokens to go: one ends every five steps."""


@pytest.mark.parametrize(
    ("load", "ahead", "num_blocks", "queue_s"),
    [
        pytest.param(
            RunningLoad(
                num_running=4,
                num_decodes=4,
                num_context_tokens=500,
                num_free_slots=100,
                num_free_blocks=1000,
                num_used_blocks=100,
                num_output_tokens=400.0,
            ),
            QueuedAhead(num_requests=3, num_prefill_tokens=300, num_blocks=20),
            0,
            # Three budgets and half a step, next to four decodes, and the tokens.
            3.5 * (1.0 + 0.4 + 0.5) + 3.0,
            id="the prefill ahead",
        ),
        pytest.param(
            RunningLoad(
                num_running=1,
                num_decodes=1,
                num_free_slots=100,
                num_free_blocks=10,
                num_used_blocks=1,
                num_output_tokens=10.0,
                prefill_budget_tokens=20,
            ),
            QueuedAhead(num_requests=1, num_prefill_tokens=100),
            0,
            5.5 * 1.1 + 1.0,
            id="a paced budget",
        ),
        pytest.param(
            TEN,
            QueuedAhead(num_requests=2, num_prefill_tokens=20),
            0,
            15.5 * 2.0 + 0.2,  # three must leave
            id="slots",
        ),
        pytest.param(
            replace(TEN, num_free_slots=50, num_free_blocks=20),
            QueuedAhead(num_requests=1, num_blocks=50),
            10,
            20.5 * 2.0,  # 40 blocks are short, so four must leave
            id="blocks",
        ),
        pytest.param(
            TEN,
            QueuedAhead(num_requests=12, num_output_tokens=240.0),
            0,
            (50 + 6 + 0.5) * 2.0,  # then three of 20 tokens leave, one every two steps
            id="those ahead leave in their turn",
        ),
    ],
)
def test_expected_queue(
    load: RunningLoad, ahead: QueuedAhead, num_blocks: int, queue_s: float
) -> None:
    want = Demand(num_prefill_tokens=50, num_blocks=num_blocks)

    assert _expected_queue(MACHINE, want, load, ahead).seconds == pytest.approx(queue_s)


def test_expected_prefill_and_decode_share_the_machine() -> None:
    load = RunningLoad(
        num_running=10,
        num_decodes=10,
        num_context_tokens=1000,
        num_free_slots=4,
        num_free_blocks=100,
        num_used_blocks=100,
        num_output_tokens=500.0,
    )
    want = Demand(num_prefill_tokens=150, expected_output_tokens=21.0)

    outlook = forecast(MACHINE, want, load, NO_TENANT)

    assert outlook.prefill_s == pytest.approx(2 * 3.0 + 1.5 + (50 + 150) * 0.001)
    assert outlook.decode_s == pytest.approx(20 * (3.0 + 0.1 + 160.5 * 0.001))
    assert outlook.total_s == pytest.approx(outlook.queue_s + outlook.prefill_s + outlook.decode_s)


def test_predicted_late_when_not_even_the_machine_alone_suffices() -> None:
    want = Demand(num_prefill_tokens=50, min_output_tokens=11)
    decode_s = 10 * (1.0 + 0.1 + 0.05)

    assert latest_admission_s(MACHINE, want) == math.inf
    assert latest_admission_s(MACHINE, want, ttft_deadline_s=100.0) == pytest.approx(98.45)
    assert latest_admission_s(MACHINE, want, deadline_s=100.0) == pytest.approx(98.45 - decode_s)
    assert latest_admission_s(
        MACHINE, want, ttft_deadline_s=50.0, deadline_s=100.0
    ) == pytest.approx(48.45)


def test_predicted_late_is_what_admission_would_reject() -> None:
    want = Demand(num_prefill_tokens=250, min_output_tokens=3)
    deadlines = {"ttft_deadline_s": 20.0, "deadline_s": 21.0}
    moment_s = latest_admission_s(MACHINE, want, **deadlines)
    alone = forecast_alone(MACHINE, want)

    assert can_meet(alone, moment_s - 0.001, **deadlines)
    assert not can_meet(alone, moment_s + 0.001, **deadlines)


def test_each_deadline_is_checked() -> None:
    outlook = Forecast(queue_s=1.0, prefill_s=2.0, decode_s=3.0)

    assert can_meet(outlook, 10.0)
    assert can_meet(outlook, 10.0, ttft_deadline_s=13.1, deadline_s=16.1)
    assert not can_meet(outlook, 10.0, ttft_deadline_s=12.9)
    assert not can_meet(outlook, 10.0, deadline_s=15.9)


def test_retry_time_is_when_the_backlog_has_shrunk_enough() -> None:
    expected = Forecast(queue_s=8.0, prefill_s=2.0, decode_s=10.0)

    assert retry_after_s(expected, 100.0, ttft_deadline_s=107.0) == pytest.approx(3.0)
    assert retry_after_s(expected, 100.0, deadline_s=115.0) == pytest.approx(5.0)
    assert retry_after_s(expected, 100.0, ttft_deadline_s=100.5) == pytest.approx(8.0)
    assert retry_after_s(expected, 100.0) == pytest.approx(8.0)


def test_retry_stays_within_its_limits() -> None:
    assert retry_after_s(Forecast(queue_s=0.0, prefill_s=9.0, decode_s=0.0), 0.0) == 0.1
    assert retry_after_s(Forecast(queue_s=1e6, prefill_s=9.0, decode_s=0.0), 0.0) == 60.0


def test_an_invalid_field_is_named() -> None:
    with pytest.raises(ValueError, match="max_prefill_tokens"):
        MachineModel(cost=COST, max_prefill_tokens=0)
    with pytest.raises(ValueError, match="p90"):
        StepError(p90=math.nan)
    with pytest.raises(ValueError, match="num_prefill_tokens"):
        Demand(num_prefill_tokens=0)
    with pytest.raises(ValueError, match="num_cached_tokens"):
        Demand(num_prefill_tokens=1, num_cached_tokens=-1)
