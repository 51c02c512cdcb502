"""Which blocks of a prompt another unfinished request may still compute."""

from penstock.scheduler.live_prefixes import MAX_EXAMINED, LivePrefixes
from penstock.scheduler.request import Request
from support.core import BLOCK_SIZE, make_spec

NUM_BLOCKS = 4


def request(key: int, num_shared: int) -> Request:
    """Return a request with a prompt of four blocks. The first `num_shared` blocks are the same for
    all requests.
    """
    shared = list(range(num_shared * BLOCK_SIZE))
    own = [900 + key] * ((NUM_BLOCKS - num_shared) * BLOCK_SIZE)
    spec = make_spec(key, [*shared, *own])
    return Request(
        spec=spec, sequence=key, tokens=spec.prompt_ids, block_hashes=list(spec.block_hashes)
    )


def wanted(prefixes: LivePrefixes, one: Request) -> list[bool]:
    return [prefixes.may_be_computed(one, index) for index in range(NUM_BLOCKS + 1)]


def test_blocks_that_another_request_computes_are_expected_up_to_the_common_prefix() -> None:
    prefixes, first, second = LivePrefixes(), request(1, 4), request(2, 3)
    prefixes.add(first, 0)
    assert wanted(prefixes, second) == [True, True, True, False, False]
    prefixes.remove(first)
    assert not any(wanted(prefixes, second))


def test_a_requests_own_blocks_are_not_expected_from_itself() -> None:
    prefixes, first, second = LivePrefixes(), request(1, 4), request(2, 4)
    prefixes.add(first, 0)
    assert not any(wanted(prefixes, first))
    prefixes.add(second, 0)
    assert wanted(prefixes, first) == [True, True, True, True, False]
    prefixes.remove(second)
    assert not any(wanted(prefixes, first))


def test_blocks_cached_at_submission_are_not_expected_from_the_request() -> None:
    prefixes, first, second = LivePrefixes(), request(1, 4), request(2, 4)
    prefixes.add(first, 2)
    assert wanted(prefixes, second) == [False, False, True, True, False]
    prefixes.add(second, 3)
    assert wanted(prefixes, first) == [False, False, False, True, False]


def test_a_request_without_entries_may_be_removed_and_faults_are_found() -> None:
    prefixes, first, second = LivePrefixes(), request(1, 4), request(2, 2)
    prefixes.add(first, 0)
    prefixes.add(second, NUM_BLOCKS)
    prefixes.remove(second)
    assert prefixes.faults({1: first, 2: second}) == []
    assert prefixes.faults({2: second}) != []
    prefixes._first_of[2] = second.spec.block_hashes[0]
    assert prefixes.faults({1: first, 2: second}) != []


def test_beyond_a_limit_of_requests_further_blocks_are_assumed_expected() -> None:
    prefixes = LivePrefixes()
    crowd = [request(key, 1) for key in range(2, MAX_EXAMINED + 3)]
    for other in crowd[1:]:
        prefixes.add(other, 0)
    assert wanted(prefixes, request(1, 4)) == [True, False, False, False, False]
    prefixes.add(crowd[0], 0)
    assert wanted(prefixes, request(1, 4)) == [True, True, True, True, False]
