"""Which running requests are preempted for other tenants, how many, and which never are."""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.scheduler import victims
from penstock.scheduler.config import AdmissionPolicy
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Preempted
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.request import Request, RequestSpec
from penstock.scheduler.victims import MAX_PREEMPTED, MAX_TENANT_PREEMPTIONS, Shortage
from support.core import FakeClock, changed, make_engine, make_spec, victims_of

MAX_TRIES = 8


def build(**options: Any) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    settings: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "watermark": 0.0,
        "yield_ratio": 2.0,
        "max_prefill_share": 1.0,
        "tenant_burst_tokens": 1e6,
    }
    return make_engine(clock=clock, **(settings | options))[0], clock


def flood(key: int, num_prompt: int, max_tokens: int = 12) -> RequestSpec:
    return make_spec(key, num_prompt, tenant="flood", max_tokens=max_tokens)


def run(engine: Engine, specs: Sequence[RequestSpec]) -> None:
    for spec in specs:
        engine.submit((spec,))
    engine.step()
    assert len(engine.running) == len(specs)


def shares_of(engine: Engine) -> FairShare:
    return FairShare(engine.arrays, engine.cache, engine.running, engine.tenants, 2.0)


def chosen(engine: Engine, num_blocks_short: int, *, is_slot: bool = False) -> list[int]:
    """Return the keys of the requests that would be preempted for the first request of another
    tenant, if `num_blocks_short` blocks and, with `is_slot`, a slot are missing.
    """
    lack = Shortage(
        tenant=engine.tenants.join("quiet"),
        level=0,
        is_slot=is_slot,
        num_blocks_short=num_blocks_short,
        num_blocks=1,
    )
    found = victims_of(engine).choose_for_tenant(shares_of(engine), lack, set())
    engine.tenants.leave(lack.tenant)
    return [request.spec.key for request, _ in found]


def test_at_most_max_preempted_requests_are_preempted_for_one() -> None:
    engine, _ = build()
    run(engine, [flood(key, 12) for key in range(1, 11)])
    assert len(chosen(engine, 3 * MAX_PREEMPTED)) == MAX_PREEMPTED
    assert chosen(engine, 3 * MAX_PREEMPTED + 1) == []


def test_a_tenant_keeps_its_only_request() -> None:
    engine, _ = build()
    run(engine, [flood(1, 48)])
    assert chosen(engine, 1) == []
    assert chosen(engine, 0, is_slot=True) == []


def test_of_several_a_tenant_keeps_one() -> None:
    engine, _ = build(max_num_seqs=4)
    run(engine, [flood(1, 48), flood(2, 44)])
    assert chosen(engine, 12) == [1]
    assert chosen(engine, 13) == []


@pytest.mark.parametrize(("num_done", "found"), [(MAX_TRIES - 1, [99]), (MAX_TRIES, [])])
def test_requests_that_cannot_be_preempted_count_among_those_examined(
    num_done: int, found: list[int]
) -> None:
    assert victims._MAX_TRIES == MAX_TRIES
    engine, _ = build()
    run(engine, [*(flood(key, 5) for key in range(1, num_done + 1)), flood(99, 8)])
    requests = engine.requests
    for key in range(1, num_done + 1):
        requests[key].num_tenant_preemptions = MAX_TENANT_PREEMPTIONS
    assert chosen(engine, 1) == found


def test_a_step_examines_few_requests_regardless_of_how_many_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = build(num_blocks=200, max_num_seqs=64)
    run(engine, [flood(key, 3) for key in range(1, 65)])
    looked_at: list[int] = []

    def noted(request: Request) -> bool:
        looked_at.append(request.spec.key)
        return False

    monkeypatch.setattr(victims, "_may_be_preempted", noted)
    assert chosen(engine, 1) == []
    assert len(looked_at) == MAX_TRIES


def test_a_request_that_could_not_be_preempted_is_not_examined_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = build()
    # No one frees enough, so those that free most come first, round for round.
    run(
        engine, [*(flood(key, 12) for key in range(1, 7)), *(flood(key, 8) for key in (11, 12, 13))]
    )
    for key in range(1, 7):
        engine.requests[key].num_tenant_preemptions = MAX_TENANT_PREEMPTIONS
    looked_at: list[int] = []
    may_be_preempted = victims._may_be_preempted

    def noted(request: Request) -> bool:
        looked_at.append(request.spec.key)
        return may_be_preempted(request)

    monkeypatch.setattr(victims, "_may_be_preempted", noted)
    assert chosen(engine, 6) == [11, 12, 13]
    assert sorted(key for key in looked_at if key < 10) == [1, 2, 3, 4, 5, 6]


def test_reserved_blocks_count_as_used() -> None:
    engine, _ = build(
        num_blocks=20, max_num_seqs=8, admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT
    )
    # One block each now, ten in the end.
    run(engine, [flood(1, 4, max_tokens=37)])
    tenant = engine.requests[1].tenant
    assert int(engine.arrays.num_blocks[engine.requests[1].slot]) < 10
    shares = shares_of(engine)
    assert shares.dominant[tenant] == pytest.approx(10 / 20)
    other = engine.tenants.join("quiet")
    assert shares.is_under_share(other, num_slots=1, num_blocks=5)
    assert not shares.is_under_share(other, num_slots=1, num_blocks=6)


@pytest.mark.parametrize(
    ("options", "wait_s", "is_taken"),
    [
        ({"max_overtake_s": 10.0}, 9.0, True),
        ({"max_overtake_s": 10.0}, 11.0, False),
        ({"max_overtake_s": 10.0, "max_num_overtakes": 0}, 9.0, False),
    ],
)
def test_tenants_under_their_share_pass_a_huge_request_only_for_a_limited_time(
    options: dict[str, Any], wait_s: float, is_taken: bool
) -> None:
    engine, clock = build(num_blocks=20, **options)
    # Known from before, so that it is the first in turn when it comes back.
    engine.submit((make_spec(10, 1, tenant="quiet", max_tokens=1),))
    engine.step()
    run(engine, [flood(key, 20) for key in (1, 2, 3)])
    engine.submit((flood(9, 40),))
    engine.step()
    assert len(engine.queue) == 1
    clock.now_s += wait_s
    engine.submit((make_spec(20, 20, tenant="quiet", max_tokens=2),))
    assert bool(changed([engine.step()], Preempted)) is is_taken


def test_a_block_shared_with_the_new_request_does_not_count_as_freed() -> None:
    engine, _ = build(num_blocks=20)
    prompt = list(range(32))
    engine.submit((make_spec(1, prompt, tenant="flood", max_tokens=12),))
    engine.submit((flood(2, 40),))
    engine.step()
    engine.step()
    # It shares eight blocks with the first request; only one other block of that request would
    # become free.
    late = make_spec(9, [*prompt, *range(700, 728)], tenant="quiet", max_tokens=2)
    matched = engine.cache.pool.match(late.block_hashes)
    assert len(matched) == 8
    held = int(engine.arrays.num_blocks[engine.requests[1].slot])
    lack = Shortage(
        tenant=engine.tenants.join("quiet"),
        level=0,
        is_slot=False,
        num_blocks_short=held - 8,
        num_blocks=1,
        matched=tuple(matched),
    )
    found = victims_of(engine).choose_for_tenant(shares_of(engine), lack, set())
    assert [(request.spec.key, num_freed) for request, num_freed in found] == [(1, held - 8)]
