"""Invariants of routers: round robin distributes requests evenly, and prefix affinity ends at the
overload limit.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.routing import LeastLoaded, PrefixAware, RoundRobin

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def asks(prefix_ids: tuple[int, ...]) -> TraceRequest:
    return TraceRequest(
        arrival_s=0.0,
        num_prompt_tokens=4 * len(prefix_ids),
        num_output_tokens=1,
        prefix_ids=prefix_ids,
        prefix_block_tokens=4,
    )


@given(st.integers(1, 9), st.integers(0, 100))
def test_round_robin_spreads_evenly(num_replicas: int, num_requests: int) -> None:
    router = RoundRobin(num_replicas)

    counts = Counter(router.route(asks((1,)), [0] * num_replicas) for _ in range(num_requests))

    sizes = [counts[replica] for replica in range(num_replicas)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(LOADS.filter(lambda loads: len(loads) == 3), max_size=20))
def test_least_loaded_takes_the_least_load(history: list[list[int]]) -> None:
    router = LeastLoaded(3)

    for loads in history:
        assert loads[router.route(asks((1,)), loads)] == min(loads)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.integers(0, 40), min_size=4, max_size=4),
        ),
        max_size=30,
    ),
    st.floats(1.0, 4.0),
    st.integers(0, 10),
)
def test_prefix_affinity_does_not_override_the_overload_limit(
    requests: list[tuple[list[int], list[int]]], factor: float, slack: int
) -> None:
    router = PrefixAware(4, factor=factor, slack=slack, max_index_tokens=32)
    held: list[set[tuple[int, ...]]] = [set() for _ in range(4)]

    for path, loads in requests:
        # Ids identify the prefix before them: each path has its own numbering.
        ids = tuple(
            sum(4**place * (one + 1) for place, one in enumerate(path[: n + 1]))
            for n in range(len(path))
        )
        chosen = router.route(asks(ids), loads)
        load, least = loads[chosen], min(loads)
        assert load <= factor * least or load - least <= slack
        if load > least:
            # Only a prefix that was sent there before justifies a target with more load.
            assert ids[:1] in held[chosen]
        held[chosen].add(ids[:1])
