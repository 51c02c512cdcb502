"""In a fair order, a full queue displaces requests of the tenant that has the largest share of the
queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler.config import SchedulingOrder
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed
from penstock.scheduler.request import FailureReason, RequestSpec
from support.core import make_engine, make_spec

NUM_PLACES = 8


def engine_of(**config: Any) -> Engine:
    engine, _ = make_engine(max_num_seqs=1, **{"max_num_waiting": NUM_PLACES, **config})
    return engine


def submit(engine: Engine, *specs: RequestSpec) -> list[int]:
    """Submit each spec as a separate request; return the keys of requests that were rejected or
    displaced.
    """
    for spec in specs:
        engine.submit((spec,))
    return rejected(engine)


def rejected(engine: Engine) -> list[int]:
    ends = [end for end in engine.events.ends if isinstance(end, Failed)]
    assert {end.reason for end in ends} <= {FailureReason.QUEUE_FULL}
    engine.events.ends.clear()
    engine.check_integrity()
    return [end.key for end in ends]


def specs_of(tenant: str, keys: Sequence[int], priority: int = 0) -> list[RequestSpec]:
    return [make_spec(key, tenant=tenant, priority=priority) for key in keys]


def outputs_of(tenant: str, keys: Sequence[int]) -> tuple[RequestSpec, ...]:
    prompt = list(range(40, 45))
    return tuple(
        replace(
            make_spec(key, prompt, request_id=f"r{keys[0]}", tenant=tenant),
            leader_key=keys[0] if index else 0,
            output_index=index,
        )
        for index, key in enumerate(keys)
    )


def test_the_newest_of_the_largest_share_is_displaced_until_shares_are_equal() -> None:
    engine = engine_of()
    assert submit(engine, *specs_of("flood", range(1, 11))) == [9, 10]

    assert submit(engine, *specs_of("quiet", range(11, 16))) == [8, 7, 6, 5, 15]
    assert submit(engine, *specs_of("flood", [20])) == [20]
    # A third takes from the first of equals, once: then it has two and they have three.
    assert len(submit(engine, *specs_of("third", range(21, 25)))) == 4


def test_weights_set_the_share_of_the_queue() -> None:
    engine = engine_of(tenant_weights={"heavy": 3.0})
    submit(engine, *specs_of("light", range(1, 9)))

    assert submit(engine, *specs_of("heavy", range(11, 20))) == [8, 7, 6, 5, 4, 3, 17, 18, 19]


def test_shares_of_the_queue_are_compared_in_proportion_to_weights() -> None:
    engine = engine_of(tenant_weights={"heavy": 4.0})
    submit(engine, *specs_of("heavy", range(1, 6)), *specs_of("light", [6, 7, 8]))

    assert submit(engine, *specs_of("third", [9])) == [8]


def test_a_part_stays_as_large_as_the_arriving_one_for_its_weight() -> None:
    engine = engine_of(tenant_weights={"heavy": 4.0})
    submit(engine, *specs_of("heavy", range(1, 9)))

    assert submit(engine, *specs_of("other", [9, 10])) == [8, 10]


def test_within_a_tenant_the_lower_class_is_displaced() -> None:
    engine = engine_of()
    submit(engine, *specs_of("", range(1, 5)), *specs_of("", range(5, 9), priority=2))

    assert submit(engine, *specs_of("", [9], priority=1)) == [4]
    assert submit(engine, *specs_of("", [10], priority=0)) == [10]
    assert submit(engine, *specs_of("", range(11, 16), priority=3)) == [3, 2, 1, 9, 8]


def test_a_higher_class_displaces_no_request_of_a_tenant_with_a_smaller_share() -> None:
    engine = engine_of()
    submit(engine, *specs_of("urgent", range(1, 7), priority=9), *specs_of("meek", [7, 8]))

    assert submit(engine, *specs_of("urgent", [9], priority=9)) == [9]
    assert submit(engine, *specs_of("meek", [10])) == [6]


def test_the_order_fcfs_ignores_tenants() -> None:
    engine = engine_of(order=SchedulingOrder.FCFS)
    submit(engine, *specs_of("flood", range(1, 9)))

    assert submit(engine, *specs_of("quiet", [9])) == [9]


def test_the_limit_of_waiting_tokens_also_displaces() -> None:
    engine = engine_of(max_num_waiting=64, max_num_waiting_tokens=50)
    huge = [make_spec(key, 20, tenant="flood") for key in (1, 2)]
    submit(engine, *huge, *[make_spec(key, 3, tenant="quiet") for key in (3, 4, 5)])

    # By requests the quiet tenant has more.
    assert submit(engine, make_spec(6, 10, tenant="quiet")) == [2]


@pytest.mark.parametrize(("num_tokens", "gives_way"), [(100, 8), (1000, 5)])
def test_the_largest_part_is_of_tokens_or_of_requests(num_tokens: int, gives_way: int) -> None:
    engine = engine_of(max_num_waiting_tokens=num_tokens)
    submit(engine, *[make_spec(key, 3, tenant="many") for key in range(1, 6)])
    submit(engine, *[make_spec(key, 27, tenant="long") for key in (6, 7, 8)])

    assert submit(engine, make_spec(9, 3, tenant="third")) == [gives_way]


def test_outputs_of_a_request_are_displaced_together_unless_one_was_admitted() -> None:
    engine = engine_of(max_num_waiting=4)
    engine.submit(outputs_of("flood", [1, 2]))
    engine.submit(outputs_of("flood", [3, 4]))
    assert submit(engine, make_spec(9, tenant="quiet")) == [4, 3]

    engine.step()  # admits the leader of the first; its follower waits
    submit(engine, *specs_of("quiet", [10]))
    assert submit(engine, *specs_of("third", [11, 12, 13])) != [2]
    assert 2 in engine.requests


def test_a_request_larger_than_a_fair_share_of_the_queue_is_displaced() -> None:
    engine = engine_of()
    engine.submit(outputs_of("wide", range(1, 9)))

    assert submit(engine, *specs_of("wide", [9])) == [9]
    engine.submit(outputs_of("other", range(11, 16)))
    assert rejected(engine) == [11, 12, 13, 14, 15], "five of eight are no fair part either"
    assert submit(engine, *specs_of("quiet", [21])) == [8, 7, 6, 5, 4, 3, 2, 1]
    # It comes back where there is room, and takes no place from a tenant with less.
    engine.submit(outputs_of("wide", range(31, 39)))
    assert len(rejected(engine)) == 8
    engine.submit(outputs_of("wide", range(41, 48)))
    assert rejected(engine) == []


def test_a_tenant_of_little_weight_may_queue_one_request() -> None:
    engine = engine_of(tenant_weights={"heavy": 100.0})
    submit(engine, *specs_of("a", [1]), *specs_of("b", [2]), *specs_of("heavy", range(11, 17)))

    assert submit(engine, *specs_of("heavy", [17])) == [17]


def test_a_prompt_larger_than_a_fair_share_of_the_tokens_is_displaced() -> None:
    engine = engine_of(max_num_waiting=64, max_num_waiting_tokens=50)
    submit(engine, make_spec(1, 45, tenant="long"))

    assert submit(engine, make_spec(2, 26, tenant="quiet")) == [2]
    assert submit(engine, make_spec(3, 25, tenant="quiet")) == [1]

    # Where requests are what is short, a long prompt is one like any.
    engine = engine_of(max_num_waiting=2, max_num_waiting_tokens=50)
    submit(engine, make_spec(1, 40, tenant="long"), make_spec(2, 3, tenant="other"))
    assert submit(engine, make_spec(3, 3, tenant="quiet")) == [3]


def test_a_request_of_more_outputs_than_places_is_rejected_for_good() -> None:
    engine = engine_of(max_num_waiting=4)
    engine.submit(outputs_of("", range(1, 6)))
    ends = [end for end in engine.events.ends if isinstance(end, Failed)]
    assert [end.reason for end in ends] == [FailureReason.TOO_MANY_OUTPUTS] * 5
    assert {end.retry_after_s for end in ends} == {math.inf}

    engine.submit(outputs_of("", range(11, 15)))
    assert len(engine.queue) == 4


def test_a_request_that_is_rejected_for_its_deadline_displaces_nothing() -> None:
    engine = engine_of()
    submit(engine, *specs_of("flood", range(1, 9)))

    engine.submit((make_spec(9, tenant="quiet", deadline_s=-1.0),))

    ends = [end.key for end in engine.events.ends]
    assert ends == [9]


@pytest.mark.parametrize("num_flooding", [50, 500])
def test_a_rejected_flood_changes_nothing_that_waits(num_flooding: int) -> None:
    engine = engine_of()
    submit(engine, *specs_of("flood", range(1, 9)))

    flood = specs_of("flood", range(100, 100 + num_flooding))
    assert submit(engine, *flood) == [spec.key for spec in flood]


def test_if_the_largest_share_cannot_be_displaced_the_next_one_is() -> None:
    engine = engine_of()
    engine.submit(outputs_of("pinned", range(1, 7)))
    engine.step()  # the leader is admitted, five followers wait for good
    submit(engine, *specs_of("large", range(11, 14)))

    assert submit(engine, *specs_of("small", [21])) == [13]
