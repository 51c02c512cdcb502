"""The bounds documented in fair_order.py hold under any load that hypothesis generates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Preempted
from penstock.scheduler.request import NO_TIME
from penstock.scheduler.victims import MAX_PREEMPTED, MAX_TENANT_PREEMPTIONS
from support.core import FakeClock, make_engine, make_spec, run_until_idle, service_of
from support.examples import fewer_examples

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
    engine, _ = make_engine(
        max_num_seqs=NUM_SLOTS,
        pipeline_depth=depth,
        tenant_weights={"b": weight},
        aging_s=NO_TIME,
        max_lookahead=0,
    )
    key = 0
    for tenant, load in zip("ab", loads, strict=True):
        for prompt, max_tokens in load:
            key += 1
            engine.submit((make_spec(key, prompt, max_tokens=max_tokens, tenant=tenant),))
    tenants = engine.tenants
    bound = (MAX_PROMPT + 2 * NUM_SLOTS * MAX_OUTPUT) / min(1.0, weight)
    while tenants.num_waiting_of("a") and tenants.num_waiting_of("b"):
        engine.step()
        assert abs(service_of(tenants, "a") - service_of(tenants, "b")) <= bound
    run_until_idle(engine)


@given(
    rounds=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(1, MAX_PROMPT),
            st.integers(1, MAX_OUTPUT),
            st.integers(0, 6),
        ),
        min_size=10,
        max_size=60,
    ),
    burst=st.sampled_from([0.0, 20.0, 1000.0]),
    ratio=st.sampled_from([1.5, 2.0, NO_TIME]),
)
def test_a_returning_tenant_has_at_most_a_burst_of_service(
    rounds: list[tuple[str, int, int, int]], burst: float, ratio: float
) -> None:
    engine, _ = make_engine(
        max_num_seqs=NUM_SLOTS,
        aging_s=NO_TIME,
        max_lookahead=0,
        tenant_burst_tokens=burst,
        yield_ratio=ratio,
    )
    tenants = engine.tenants
    bound = burst + MAX_PROMPT + 2 * NUM_SLOTS * MAX_OUTPUT
    for key, (tenant, prompt, max_tokens, pause) in enumerate(rounds, 1):
        engine.submit((make_spec(key, prompt, max_tokens=max_tokens, tenant=tenant),))
        for _ in range(pause):
            engine.step()
            if tenants.num_waiting_of("a") and tenants.num_waiting_of("b"):
                assert abs(service_of(tenants, "a") - service_of(tenants, "b")) <= bound
    run_until_idle(engine)


@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from("aaab"),
            st.integers(1, 40),
            st.integers(1, MAX_OUTPUT),
            st.integers(0, 1),
            st.integers(0, 3),
        ),
        min_size=10,
        max_size=60,
    ),
    num_blocks=st.sampled_from([13, 24, 64]),
    stride=st.integers(2, 4),
    depth=st.sampled_from([1, 2]),
)
@fewer_examples(20)
def test_the_cost_of_tenants_under_their_share_to_others_is_bounded(
    arrivals: list[tuple[str, int, int, int, int]], num_blocks: int, stride: int, depth: int
) -> None:
    clock = FakeClock()
    engine, _ = make_engine(
        clock=clock,
        max_num_seqs=5,
        num_blocks=num_blocks,
        pipeline_depth=depth,
        max_num_batched_tokens=8,
        watermark=0.0,
        aging_stride=stride,
        aging_s=4.0,
        yield_ratio=2.0,
    )
    stalled = StallCounter(engine)
    for key, (tenant, prompt, max_tokens, priority, pause) in enumerate(arrivals, 1):
        spec = make_spec(
            key, prompt, max_tokens=max_tokens, tenant=tenant, priority=priority,
            arrival_s=clock.now_s,
        )  # fmt: skip
        engine.submit((spec,))
        for _ in range(pause):
            turn(engine, clock, stalled, stride)
    for _ in range(5_000):
        if not engine.has_work:
            break
        turn(engine, clock, stalled, stride)
    assert not engine.has_work
    assert engine.cache.pool.num_used == 0


class StallCounter:
    """Counts steps in a row in which the first prompt in prefill got no tokens."""

    def __init__(self, engine: Engine) -> None:
        self._life = engine
        self._first = (0, -1)
        self.num_steps = 0

    def look(self) -> None:
        under_way = self._life.running.prefilling_by_level()
        first = (0, -1)
        if under_way:
            request = under_way[0]
            num_computed = int(self._life.arrays.num_computed[request.slot])
            first = (request.spec.key, num_computed)
        is_same = first[0] and first == self._first
        self.num_steps = self.num_steps + 1 if is_same else 0
        self._first = first


def turn(engine: Engine, clock: FakeClock, stalled: StallCounter, stride: int) -> None:
    """Run one step, which takes a second, and check the bounds of stalls and of tenant
    preemption.
    """
    before = {key: (r.num_tenant_preemptions, r.spec.tenant) for key, r in engine.requests.items()}
    changes = engine.step().changes
    engine.check_integrity()
    clock.now_s += 1.0
    stalled.look()
    assert stalled.num_steps < stride
    preempted = {change.key for change in changes if isinstance(change, Preempted)}
    new = [change.key for change in changes if isinstance(change, Admitted)]
    assert all(
        request.num_tenant_preemptions <= MAX_TENANT_PREEMPTIONS
        for request in engine.requests.values()
    )
    yielded = [
        key for key in preempted if key in engine.requests
        and engine.requests[key].num_tenant_preemptions > before[key][0]
    ]  # fmt: skip
    assert len(yielded) <= MAX_PREEMPTED * max(1, len(new))
    if preempted and new:
        losers = {before[key][1] for key in preempted}
        assert losers.isdisjoint(before[key][1] for key in new)


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
def test_a_request_that_waits_long_enough_is_admitted_in_bounded_turns(
    flood: list[tuple[int, str, int]], priority: int, stride: int, patience_s: float
) -> None:
    aging_s = 5.0
    clock = FakeClock()
    engine, _ = make_engine(clock=clock, max_num_seqs=1, aging_s=aging_s, aging_stride=stride)
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
        # One slot: no tenant is light, so the bound is that without light tenants.
        assert len(late) <= stride * (len(senior) + 1)


def step(engine: Engine, clock: FakeClock, order: list[int], admitted_s: dict[int, float]) -> None:
    for change in engine.step().changes:
        if isinstance(change, Admitted):
            order.append(change.key)
            admitted_s[change.key] = clock.now_s
    clock.now_s += 1.0
