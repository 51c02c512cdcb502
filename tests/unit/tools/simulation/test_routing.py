"""Routing decisions for given loads and prefixes, and the age of the loads that a load balancer
sees.
"""

import math

import pytest

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.load_signal import LoadAccount, LoadSignal
from penstock.tools.simulation.routing import (
    LeastLoaded,
    PrefixAware,
    PrefixIndex,
    RoundRobin,
    RouterKind,
    RoutingConfig,
    build_router,
)


def asks(
    *prefix_ids: int, arrival_s: float = 0.0, tenant: str = "", num_prompt_tokens: int = 0
) -> TraceRequest:
    """Return a request whose prompt has a block of four tokens for each of `prefix_ids`."""
    return TraceRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt_tokens or max(1, 4 * len(prefix_ids)),
        num_output_tokens=1,
        tenant=tenant,
        prefix_ids=prefix_ids,
        prefix_block_tokens=4,
    )


def prefix_aware(num_replicas: int = 3, max_index_tokens: int = 400) -> PrefixAware:
    return PrefixAware(num_replicas, factor=1.5, slack=4, max_index_tokens=max_index_tokens)


def test_round_robin_ignores_the_load() -> None:
    router = RoundRobin(3)

    assert [router.route(asks(), (9, 0, 0)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_least_load_and_equal_ones_in_turn() -> None:
    router = LeastLoaded(3)

    assert router.route(asks(), (2, 1, 3)) == 1
    assert [router.route(asks(), (5, 5, 5)) for _ in range(3)] == [0, 2, 1]


def test_a_prompt_follows_its_prefix() -> None:
    router = prefix_aware()
    first = router.route(asks(1, 2), (0, 0, 0))
    second = router.route(asks(7, 8), (0, 0, 0))

    assert first != second
    # The load is not even, but not so uneven that it counts.
    loads = tuple(4 if replica == first else 0 for replica in range(3))
    assert router.route(asks(1, 2, 3), loads) == first
    assert router.route(asks(7, 9), (0, 0, 0)) == second


def test_the_longest_prefix_wins_then_the_least_load() -> None:
    router = prefix_aware()
    assert [router.route(asks(1), (0, 1, 1)), router.route(asks(1, 2), (1, 0, 1))] == [0, 0]
    # Both hold block 1 now, and only replica 0 what follows it.
    assert router.route(asks(1), (9, 2, 1)) == 2

    assert router.route(asks(1, 2, 3), (3, 0, 0)) == 0
    assert router.route(asks(1, 5), (3, 3, 2)) == 2


def test_prefixes_of_an_overloaded_replica_are_routed_to_others_that_have_them() -> None:
    router = prefix_aware()
    home = router.route(asks(1, 2), (0, 5, 5))

    assert home == 0
    assert router.route(asks(1, 2), (11, 7, 6)) == 2
    # Replica 2 has them now as well, and replica 1 has less to do but does not.
    assert router.route(asks(1, 2), (11, 5, 6)) == 2
    # More than 4 above the least, but not above 1.5 times it: none is overloaded.
    assert router.route(asks(1, 2), (25, 20, 26)) == home


def test_overloaded_needs_both_the_factor_and_the_slack() -> None:
    router = prefix_aware()

    assert not router.is_overloaded(4, 0)
    assert router.is_overloaded(5, 0)
    assert not router.is_overloaded(15, 10)
    assert router.is_overloaded(16, 10)


def test_a_prefix_of_all_prompts_leaves_no_replica_idle() -> None:
    router = PrefixAware(3, factor=1.5, slack=8, max_index_tokens=400, min_share=0.3)
    prompts = [asks(0, *(10 * i + place for place in range(1, 5))) for i in range(6)]

    # One block of five is common to all, too little to follow.
    assert [router.route(prompt, (0, 0, 0)) for prompt in prompts] == [0, 1, 2, 0, 1, 2]
    assert router.route(asks(0, 11, 12), (0, 0, 0)) == 1


def test_tenants_do_not_share_prefixes() -> None:
    index = PrefixIndex(10)
    index.add(asks(1, 2, tenant="a"))

    assert index.num_matched_tokens(asks(1, 2, tenant="a")) == 8
    assert index.num_matched_tokens(asks(1, 2, tenant="b")) == 0


def test_the_index_evicts_the_ends_of_the_least_recently_used_prefixes() -> None:
    index = PrefixIndex(4)
    index.add(asks(1, 2, 3))
    index.add(asks(8, 9))

    assert len(index) == 4
    assert index.num_matched_tokens(asks(1, 2, 3)) == 8
    assert index.num_matched_tokens(asks(8, 9, 10)) == 8
    index.add(asks(1))
    index.add(asks(20))
    assert index.num_matched_tokens(asks(1, 2)) == 4


def test_a_started_block_counts_what_the_prompt_has_of_it() -> None:
    index = PrefixIndex(4)
    index.add(asks(1, 2, num_prompt_tokens=6))

    assert index.num_matched_tokens(asks(1, 2, num_prompt_tokens=6)) == 6


def test_the_index_of_a_replica_is_limited_to_its_capacity() -> None:
    router = build_router(
        RoutingConfig(router=RouterKind.PREFIX_AWARE), num_replicas=2, num_cache_tokens=8
    )
    assert router.route(asks(1, 2), (0, 0)) == 0
    assert router.route(asks(5, 6), (0, 0)) == 1
    # Two blocks of four fit: the second pushes the first out of the index of replica 0.
    assert router.route(asks(3, 4), (0, 9)) == 0

    assert router.route(asks(1, 2), (1, 0)) == 1


def test_loads_are_exact_without_a_delay() -> None:
    account = LoadAccount(2, LoadSignal.REQUESTS, 0.0)
    weight = account.sent(1, asks(arrival_s=1.0))

    assert account.loads(1.0) == (0, 1)
    # The step that ends it is not over yet.
    account.ended(1, weight, 2.5)
    assert account.loads(2.0) == (0, 1)
    assert account.loads(2.5) == (0, 0)


def test_a_delayed_signal_shows_arrivals_and_ends_later() -> None:
    account = LoadAccount(1, LoadSignal.REQUESTS, 3.0)
    weight = account.sent(0, asks(arrival_s=1.0))
    account.ended(0, weight, 2.0)

    assert [account.loads(at_s) for at_s in (1.0, 3.9, 4.0, 4.9, 5.0)] == [
        (0,),
        (0,),
        (1,),
        (1,),
        (0,),
    ]


def test_tokens_distinguish_a_long_prompt_from_a_short_one() -> None:
    account = LoadAccount(2, LoadSignal.TOKENS, 0.0)
    account.sent(0, asks(num_prompt_tokens=1000))
    account.sent(1, asks(num_prompt_tokens=3))
    account.sent(1, asks(num_prompt_tokens=3))

    assert account.loads(0.0) == (1000, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_signal_delay_s", -1.0),
        ("load_signal_delay_s", math.inf),
        ("overload_factor", 0.9),
        ("overload_slack", -1),
        ("max_index_tokens", 0),
        ("min_prefix_share", 1.5),
    ],
)
def test_invalid_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RoutingConfig(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
