"""The live view lists every request and changes no state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.scheduler import output_view
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, WaitReason
from penstock.scheduler.output_view import OutputView
from penstock.scheduler.state import RequestState
from support.core import changed, make_engine, make_spec, run_until_idle


def busy(order: SchedulingOrder = SchedulingOrder.FAIR, **settings: object) -> Engine:
    """Return an engine whose only slot is occupied by a running request."""
    config = replace(
        SchedulerConfig(max_num_batched_tokens=64, order=order, yield_ratio=math.inf),
        **settings,  # type: ignore[arg-type]  # fields of SchedulerConfig
    )
    engine, _ = make_engine(config=config, max_num_seqs=1)
    engine.submit((make_spec(1, 5, max_tokens=3, tenant="a"),))
    engine.step()
    return engine


def positions(engine: Engine) -> dict[int, int | None]:
    return {
        view.key: view.queue_position
        for view in engine.output_views()
        if view.state is RequestState.PENDING
    }


def test_running_and_waiting_requests() -> None:
    engine = busy()
    spec = replace(make_spec(2, 6, tenant="b", deadline_s=50.0), trace_id=bytes(16))
    engine.submit((spec,))
    engine.step()
    running, waiting = engine.output_views()
    assert running == OutputView(
        key=1,
        request_id="request-1",
        tenant="a",
        output_index=0,
        state=RequestState.PROCESSING,
        priority=0,
        arrival_s=0.0,
        deadline_s=math.inf,
        num_prompt_tokens=5,
        num_output_tokens=2,
        num_computed_tokens=6,
        num_blocks=2,
        num_preemptions=0,
        slot=0,
    )
    assert waiting == OutputView(
        key=2,
        request_id="request-2",
        tenant="b",
        output_index=0,
        state=RequestState.PENDING,
        priority=0,
        arrival_s=0.0,
        deadline_s=50.0,
        num_prompt_tokens=6,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_blocks=0,
        num_preemptions=0,
        waits_for=WaitReason.SLOTS,
        queue_position=0,
        trace_id=bytes(16),
    )


def test_replayed_tokens_are_shown_as_output() -> None:
    engine = busy()
    engine.submit((make_spec(2, 6, max_tokens=4, num_replayed=2),))
    view = engine.output_views()[1]
    assert (view.num_prompt_tokens, view.num_output_tokens) == (4, 2)


@pytest.mark.parametrize("order", SchedulingOrder)
def test_positions_follow_the_order_of_admission(order: SchedulingOrder) -> None:
    # What they will generate is not foreseen.
    engine = busy(order, output_token_weight=0.0)
    for key in range(2, 8):
        engine.submit((make_spec(key, 5, max_tokens=1, tenant="ab"[key > 5], priority=key == 4),))
    reported = positions(engine)
    assert sorted(reported.values(), key=lambda position: position or 0) == list(range(6))
    assert positions(engine) == reported
    assert changed(run_until_idle(engine), Admitted) == sorted(
        reported, key=lambda key: reported[key] or 0
    )


def test_a_request_that_waits_for_its_leader_or_limit_has_no_position() -> None:
    engine = busy(max_num_running_per_tenant=1)
    engine.submit((make_spec(2, 5, tenant="a"),))
    leader = make_spec(3, 8, tenant="b")
    engine.submit((leader, replace(leader, key=4, leader_key=3, output_index=1)))
    assert positions(engine) == {2: None, 3: 0, 4: None}


def test_requests_after_the_first_thousand_have_no_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_view, "MAX_POSITIONS", 2)
    engine = busy()
    for key in (2, 3, 4, 5):
        engine.submit((make_spec(key, 5),))
    assert positions(engine) == {2: 0, 3: 1, 4: None, 5: None}


def test_an_idle_engine_shows_no_request() -> None:
    engine, _ = make_engine()
    assert engine.output_views() == ()
