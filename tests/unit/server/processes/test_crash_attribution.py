"""Which requests are suspected after an engine's death, and which is found responsible."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from penstock.server.processes.engine_supervision import (
    CrashAttribution,
    EngineDeath,
    is_own_failure,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def own(*in_hand: int, on_trial: tuple[int, ...] = ()) -> EngineDeath:
    return EngineDeath(
        is_own_failure=True,
        keys_in_progress=frozenset(in_hand),
        keys_on_probation=frozenset(on_trial),
    )


def from_outside(*in_hand: int, on_trial: tuple[int, ...] = ()) -> EngineDeath:
    return EngineDeath(
        is_own_failure=False,
        keys_in_progress=frozenset(in_hand),
        keys_on_probation=frozenset(on_trial),
    )


def judged(*deaths: EngineDeath) -> tuple[set[int], set[int]]:
    """Return the keys of the requests that are on probation after these engine deaths, and the keys
    of the requests found responsible.
    """
    attribution = CrashAttribution(Clock())
    for death in deaths:
        attribution.record_death(death)
    suspects = attribution.suspects()
    return (
        {suspect.key for suspect in suspects if not suspect.is_poison},
        {suspect.key for suspect in suspects if suspect.is_poison},
    )


@pytest.mark.parametrize(
    ("code", "was_hung", "expected"),
    [
        (9, False, True),
        (70, False, True),
        (-signal.SIGSEGV, False, True),
        (-signal.SIGABRT, False, True),
        (-signal.SIGKILL, False, False),
        (-signal.SIGTERM, False, False),
        (-signal.SIGKILL, True, True),
        (0, False, False),
    ],
)
def test_the_cause_of_a_death(code: int, was_hung: bool, expected: bool) -> None:
    assert is_own_failure(code, was_hung=was_hung) is expected


def test_all_running_requests_of_a_broken_engine_get_probation() -> None:
    assert judged(own(1, 2, 3)) == ({1, 2, 3}, set())


def test_external_kills_count_from_the_second_on() -> None:
    assert judged(from_outside(1, 2)) == (set(), set())
    assert judged(from_outside(1, 2), from_outside(2, 3)) == ({2}, set())


def test_a_request_on_probation_during_another_death_is_responsible() -> None:
    # Others ran next to it: they are tried next.
    assert judged(own(1, 2), own(2, 7, on_trial=(2,))) == ({1, 7}, {2})


def test_a_hang_is_attributed_to_requests_hit_twice_on_probation_or_alone() -> None:
    in_company = replace(own(2, 7, on_trial=(2,)), was_hung=True)
    assert judged(own(1, 2), in_company) == ({1, 2, 7}, set())
    assert judged(own(1, 2), in_company, in_company) == ({1, 7}, {2})
    alone = replace(own(2), was_hung=True)
    assert judged(alone) == ({2}, set())
    assert judged(alone, alone) == (set(), {2})


def test_all_outputs_of_a_request_on_probation_are_attributed_together() -> None:
    assert judged(own(1, 2, 3), own(2, on_trial=(2, 3))) == ({1}, {2, 3})


def test_a_request_on_probation_that_does_not_run_is_not_responsible() -> None:
    assert judged(own(1, 2), own(8, on_trial=(2,))) == ({1, 2, 8}, set())


def test_the_only_running_request_of_two_deaths_is_responsible() -> None:
    assert judged(own(4), own(4)) == (set(), {4})
    assert judged(own(4)) == ({4}, set())


def test_external_kills_are_attributed_only_to_requests_hit_twice_on_probation() -> None:
    # An operator that kills an engine repeatedly makes no request fail.
    assert judged(*[from_outside(4)] * 6) == ({4}, set())
    once = (from_outside(4), from_outside(4), from_outside(4, on_trial=(4,)))
    assert judged(*once) == ({4}, set())
    assert judged(*once, from_outside(4, on_trial=(4,))) == (set(), {4})


def test_a_request_suspected_again_has_a_longer_probation() -> None:
    attribution, numbers = CrashAttribution(Clock()), []
    for _ in range(4):
        attribution.record_death(own(1, 2))
        numbers.append({suspect.num_probation_tokens for suspect in attribution.suspects()})
    assert numbers == [{2}, {16}, {128}, {128}]


def test_old_deaths_are_forgotten() -> None:
    clock = Clock()
    attribution = CrashAttribution(clock)
    attribution.record_death(own(1))
    clock.now_s += 600.0
    attribution.record_death(own(2))
    assert [suspect.key for suspect in attribution.suspects()] == [2]


def test_the_number_of_suspects_is_bounded_and_the_newest_are_kept() -> None:
    attribution = CrashAttribution(Clock())
    for first in range(1, 10_001, 1000):
        attribution.record_death(own(*range(first, first + 1000)))
    known = {suspect.key for suspect in attribution.suspects()}
    assert len(known) <= 4096 + 1000
    assert {9001, 10_000} <= known
    assert 1 not in known


def test_an_engine_without_requests_makes_no_suspects() -> None:
    assert judged(own(), own()) == (set(), set())
