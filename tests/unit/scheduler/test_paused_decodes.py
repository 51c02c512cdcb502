"""Decodes of tenants above their share pause while a prompt of a tenant under its share is in
prefill.
"""

from __future__ import annotations

import pytest

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.decode_pauses import MAX_PAUSED_STEPS
from penstock.scheduler.engine import Engine
from penstock.scheduler.forecast import RunningLoad
from support.core import NullExecutor, make_engine, make_spec

NUM_DECODES = 8
ONE_SECOND = CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)
"""Every step takes one second."""


def busy_engine(
    priority: int = 0, max_tokens: int = 400, target_itl_s: float | None = None
) -> tuple[Engine, NullExecutor]:
    """Return an engine and its executor. One tenant has decoded in many slots, so that it is above
    its share.
    """
    engine, executor = make_engine(
        num_blocks=4096,
        max_num_seqs=12,
        max_seq_len=2048,
        max_prefill_share=1.0,
        target_itl_s=target_itl_s,
        known_cost=ONE_SECOND,
    )
    # A tenant that is known and had little: a new one would start at the others' counters.
    engine.submit((make_spec(99, 4, max_tokens=1, tenant="light"),))
    while engine.has_work:
        engine.step()
    for key in range(1, NUM_DECODES + 1):
        spec = make_spec(key, 4, max_tokens=max_tokens, tenant="busy", priority=priority)
        engine.submit((spec,))
    for _ in range(40):
        engine.step()
    return engine, executor


def paused_steps(executor: NullExecutor, since: int) -> list[int]:
    return [batch.num_paused for batch in executor.batches[since:]]


def test_decodes_pause_for_a_light_prompt_a_few_steps_in_a_row() -> None:
    engine, executor = busy_engine()
    since = len(executor.batches)

    engine.submit((make_spec(100, 80, max_tokens=1, tenant="light"),))
    for _ in range(8):
        engine.step()

    paused = paused_steps(executor, since)
    assert paused[:MAX_PAUSED_STEPS] == [NUM_DECODES] * MAX_PAUSED_STEPS
    assert paused[MAX_PAUSED_STEPS] == 0
    engine.check_integrity()


@pytest.mark.parametrize(
    ("target_itl_s", "num_paused"), [(1.5, 0), (2.5, 1), (3.5, 2), (9.0, MAX_PAUSED_STEPS)]
)
def test_pauses_end_before_a_token_misses_the_latency_target(
    target_itl_s: float, num_paused: int
) -> None:
    engine, executor = busy_engine(target_itl_s=target_itl_s)
    for now, batch in enumerate(executor.batches):
        engine.note_duration(batch, 1.0, float(now))
    since = len(executor.batches)

    engine.submit((make_spec(100, 160, max_tokens=1, tenant="light"),))
    for _ in range(num_paused + 1):
        engine.step()

    assert paused_steps(executor, since) == [NUM_DECODES] * num_paused + [0]
    engine.check_integrity()


def test_the_time_between_tokens_includes_pauses() -> None:
    """The decodes are left out of three of four steps. A step takes one second, so a token takes
    four.
    """
    engine, executor = busy_engine()
    num_paused, now = 0, 0.0
    for key in range(100, 160):
        engine.submit((make_spec(key, 16, max_tokens=1, tenant="light"),))
        since = len(executor.batches)
        engine.step()
        for batch in executor.batches[since:]:
            now += 1.0
            num_paused += batch.num_paused > 0
            engine.note_duration(batch, 1.0, now)
    assert num_paused > 30
    assert engine.completion.token_time.under_load(RunningLoad(), now) == pytest.approx(
        4.0, rel=0.3
    )


def test_a_tenant_of_many_short_requests_is_not_served_more_by_pauses() -> None:
    engine, _ = busy_engine(max_tokens=1500)
    tenants = engine.tenants

    for key in range(100, 400):
        engine.submit((make_spec(key, 32, max_tokens=1, tenant="light"),))
        for _ in range(3):
            engine.step()

    busy, light = tenants.index_of("busy"), tenants.index_of("light")
    assert busy is not None
    assert light is not None
    assert tenants.service[light] < tenants.service[busy] + 100.0


def test_a_higher_class_does_not_pause() -> None:
    engine, executor = busy_engine(priority=1)
    since = len(executor.batches)

    engine.submit((make_spec(100, 80, max_tokens=1, tenant="light"),))
    for _ in range(8):
        engine.step()

    assert not any(paused_steps(executor, since))
