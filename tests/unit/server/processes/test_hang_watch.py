"""A process counts as hanging after the configured number of successive checks without
a heartbeat.
"""

from penstock.server.processes.hang_watch import HangWatch


def test_it_takes_so_many_looks_without_a_beat() -> None:
    watch = HangWatch(num_checks=3)
    assert [watch.check(1, 5) for _ in range(4)] == [False, False, False, True]


def test_a_beat_in_between_is_enough() -> None:
    watch = HangWatch(num_checks=3)
    beats = [5, 5, 5, 6, 6, 6, 7, 7]
    assert not any(watch.check(1, beat) for beat in beats)


def test_a_successor_with_the_same_count_is_another() -> None:
    watch = HangWatch(num_checks=2)
    assert [watch.check(who, 1) for who in (1, 1, 2, 2, 2)] == [False, False, False, False, True]


def test_while_there_is_nobody_nothing_counts() -> None:
    watch = HangWatch(num_checks=2)
    assert [watch.check(1, 1), watch.check(1, 1)] == [False, False]
    watch.forget()
    assert [watch.check(1, 1), watch.check(1, 1), watch.check(1, 1)] == [False, False, True]


def test_half_of_it_is_told_once() -> None:
    watch = HangWatch(num_checks=10)
    told = []
    for _ in range(10):
        watch.check(1, 1)
        told.append(watch.is_halfway)
    assert told == [number == 5 for number in range(10)]
