"""A process counts as hanging after the configured number of successive checks without
a heartbeat.
"""

from penstock.server.processes.hang_watch import HangWatch


def test_a_process_hangs_after_the_configured_number_of_checks() -> None:
    watch = HangWatch(num_checks=3)
    assert [watch.check(1, 5) for _ in range(4)] == [False, False, False, True]


def test_a_heartbeat_between_checks_resets_the_count() -> None:
    watch = HangWatch(num_checks=3)
    heartbeats = [5, 5, 5, 6, 6, 6, 7, 7]
    assert not any(watch.check(1, heartbeat) for heartbeat in heartbeats)


def test_a_new_process_with_the_same_count_starts_the_checks_again() -> None:
    watch = HangWatch(num_checks=2)
    assert [watch.check(epoch, 1) for epoch in (1, 1, 2, 2, 2)] == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_checks_start_again_after_reset() -> None:
    watch = HangWatch(num_checks=2)
    assert [watch.check(1, 1), watch.check(1, 1)] == [False, False]
    watch.reset()
    assert [watch.check(1, 1), watch.check(1, 1), watch.check(1, 1)] == [False, False, True]


def test_half_of_the_checks_is_reported_once() -> None:
    watch = HangWatch(num_checks=10)
    reported = []
    for _ in range(10):
        watch.check(1, 1)
        reported.append(watch.is_halfway)
    assert reported == [number == 5 for number in range(10)]
