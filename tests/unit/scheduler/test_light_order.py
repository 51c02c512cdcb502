"""Requests that light tenants do not pass: a higher class in progress, and aged requests."""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, StepEvents
from support.core import FakeClock, NullExecutor, make_engine, make_info, make_spec

BUDGET = 16
HIGH, LOW = 1, 0


def build(clock: FakeClock | None = None, **options: Any) -> tuple[Engine, NullExecutor]:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": BUDGET,
        "watermark": 0.0,
        "yield_ratio": 2.0,
        "max_prefill_share": 1.0,
        **options,
    }
    info = make_info(num_blocks=256, max_num_seqs=8)
    return make_engine(info, SchedulerConfig(**settings), clock)


def submit(engine: Engine, tenant: str, keys: Sequence[int], **options: Any) -> None:
    for key in keys:
        engine.submit((make_spec(key, tenant=tenant, **options),))


def admitted(events: StepEvents) -> list[int]:
    return [change.key for change in events.changes if isinstance(change, Admitted)]


def prefilled(engine: Engine, executor: NullExecutor) -> dict[int, int]:
    """Return the prompt tokens that the last step computed, by key."""
    batch, running = executor.batches[-1], engine.running
    found: dict[int, int] = {}
    rows = zip(batch.slots.tolist(), batch.num_tokens.tolist(), strict=True)
    for slot, count in list(rows)[batch.num_decodes :]:
        request = running.request_at(slot)
        assert request is not None
        found[request.spec.key] = count
    return found


def heavy(engine: Engine) -> None:
    """Run three decodes of a flooding tenant: next to them one request is light."""
    submit(engine, "flood", [1, 2, 3], prompt=3, max_tokens=50)
    engine.step()


@pytest.mark.parametrize("priority", [HIGH, LOW])
def test_a_new_light_prompt_does_not_go_before_a_higher_class_under_way(priority: int) -> None:
    engine, executor = build()
    heavy(engine)
    submit(engine, "flood", [4], prompt=60, max_tokens=2, priority=priority)
    engine.step()
    submit(engine, "quiet", [11], prompt=20, max_tokens=2)
    engine.step()
    assert list(prefilled(engine, executor)) == ([4] if priority == HIGH else [11])


@pytest.mark.parametrize("priority", [HIGH, LOW])
def test_nor_does_one_that_is_under_way_too(priority: int) -> None:
    engine, executor = build(max_prefill_share=0.5)
    heavy(engine)
    submit(engine, "flood", [4], prompt=60, max_tokens=2, priority=HIGH)
    submit(engine, "quiet", [11], prompt=60, max_tokens=2, priority=priority)
    engine.step()
    assert list(prefilled(engine, executor)) == [4, 11], "neither was under way"
    engine.step()
    assert next(iter(prefilled(engine, executor))) == (4 if priority == LOW else 11)


def test_light_requests_go_before_a_turn_by_age_so_often_and_no_more() -> None:
    stride, clock = 3, FakeClock()
    engine, _ = build(clock, aging_s=10.0, aging_stride=stride, tenant_burst_tokens=1e6)
    # Known from before, so that they are the first in turn when they come back.
    submit(engine, "quiet", [11], prompt=1, max_tokens=1)
    engine.step()
    submit(engine, "flood", range(1, 7), prompt=3, max_tokens=50)
    engine.step()
    assert len(engine.running) == 6
    clock.now_s = 1.0
    submit(engine, "flood", [7], prompt=60, max_tokens=2, arrival_s=-20.0)
    submit(engine, "quiet", range(20, 40), prompt=1, max_tokens=1, arrival_s=1.0)
    order: list[int] = []
    while 7 not in order:
        order.extend(admitted(engine.step()))
    assert 0 < order.index(7) <= 2 * stride
