from penstock.server.processes.supervised_process import RestartPolicy


def test_the_first_death_is_followed_at_once_and_then_the_delay_doubles() -> None:
    policy = RestartPolicy()
    assert [policy.record_death(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.2, 0.4, 0.8]


def test_the_fifth_death_in_a_window_is_the_last() -> None:
    policy = RestartPolicy()
    assert None not in [policy.record_death(float(now)) for now in range(4)]
    assert policy.record_death(59.0) is None


def test_deaths_out_of_the_window_do_not_count() -> None:
    policy = RestartPolicy()
    for now_s in range(4):
        policy.record_death(float(now_s))
    assert policy.record_death(61.0) == 0.4  # those at 0 and 1 are forgotten
    assert policy.record_death(1000.0) == 0.0


def test_the_delay_is_bounded() -> None:
    policy = RestartPolicy(max_deaths=100)
    delays = [policy.record_death(0.0) for _ in range(50)]
    assert max(delay for delay in delays if delay is not None) == 5.0
