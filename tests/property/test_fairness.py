"""The bounds that fair_order.py states, under any load that hypothesis finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted
from penstock.scheduler.request import NO_TIME
from support.core import FakeClock, make_engine, make_info, make_spec, run_until_idle

MAX_PROMPT = 12
MAX_OUTPUT = 8
NUM_SLOTS = 3


@given(
    loads=st.tuples(
        *[
            st.lists(
                st.tuples(st.integers(1, MAX_PROMPT), st.integers(1, MAX_OUTPUT)),
                min_size=4,
                max_size=25,
            )
        ]
        * 2
    ),
    weight=st.sampled_from([0.25, 1.0, 4.0]),
    depth=st.sampled_from([1, 2]),
)
def test_counters_of_backlogged_tenants_stay_together(
    loads: tuple[list[tuple[int, int]], list[tuple[int, int]]], weight: float, depth: int
) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=16,
        tenant_weights={"b": weight},
        aging_s=NO_TIME,
        max_lookahead=0,
    )
    info = make_info(max_num_seqs=NUM_SLOTS, pipeline_depth=depth)
    engine, _ = make_engine(info, config)
    key = 0
    for tenant, load in zip("ab", loads, strict=True):
        for prompt, max_tokens in load:
            key += 1
            engine.submit((make_spec(key, prompt, max_tokens=max_tokens, tenant=tenant),))
    tenants = engine.scheduler.life.tenants
    bound = (MAX_PROMPT + 2 * NUM_SLOTS * MAX_OUTPUT) / min(1.0, weight)
    while tenants.num_waiting_of("a") and tenants.num_waiting_of("b"):
        engine.step()
        assert abs(tenants.service_of("a") - tenants.service_of("b")) <= bound
    run_until_idle(engine)


@given(
    flood=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 3)),
        min_size=10,
        max_size=80,
    ),
    priority=st.integers(0, 2),
    stride=st.integers(1, 4),
    patience_s=st.sampled_from([NO_TIME, 1000.0]),
)
def test_who_waits_long_enough_is_admitted_in_bounded_turns(
    flood: list[tuple[int, str, int]], priority: int, stride: int, patience_s: float
) -> None:
    aging_s = 5.0
    config = SchedulerConfig(max_num_batched_tokens=16, aging_s=aging_s, aging_stride=stride)
    clock = FakeClock()
    engine, _ = make_engine(make_info(max_num_seqs=1), config, clock)
    arrivals: dict[int, tuple[float, int]] = {}
    admitted_s: dict[int, float] = {}
    order: list[int] = []

    def submit(key: int, level: int, tenant: str) -> None:
        now = clock.now_s
        arrivals[key] = (now, level)
        spec = make_spec(
            key, 2, max_tokens=2, tenant=tenant, priority=level, arrival_s=now,
            deadline_s=now + patience_s,
        )  # fmt: skip
        engine.submit((spec,))

    submit(1, priority, "a")
    for index, (level, tenant, pause) in enumerate(flood):
        submit(index + 2, level, tenant)
        for _ in range(pause):
            step(engine, clock, order, admitted_s)
    while engine.has_work:
        step(engine, clock, order, admitted_s)
    for key, (arrived_s, level) in arrivals.items():
        rank = arrived_s - level * aging_s
        before = order[: order.index(key)]
        ripe_s = arrived_s + (2 - level + 1) * aging_s
        late = [other for other in before if admitted_s[other] >= ripe_s]
        senior = [
            other
            for other, (since_s, its_level) in arrivals.items()
            if other != key
            and since_s - its_level * aging_s <= rank
            and admitted_s[other] >= ripe_s
        ]
        assert len(late) <= stride * (len(senior) + 1)


def step(engine: Engine, clock: FakeClock, order: list[int], admitted_s: dict[int, float]) -> None:
    """One step of a second; notes who was admitted, and when."""
    for change in engine.step().changes:
        if isinstance(change, Admitted):
            order.append(change.key)
            admitted_s[change.key] = clock.now_s
    clock.now_s += 1.0
