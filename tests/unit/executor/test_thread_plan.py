"""Threads that compute: how many, how they wait, and when one does a layer alone."""

from __future__ import annotations

import pytest

from penstock.executor.torch.thread_environment import describe_threads, plan_threads


@pytest.mark.parametrize(
    ("num_cores", "num_fronts", "wanted", "num_threads", "is_alone"),
    [
        (1, 1, None, 1, False),
        (2, 1, None, 1, True),
        (4, 2, None, 2, True),
        (16, 8, None, 8, True),
        (2, 4, None, 1, False),
        # An operator may take more, of cores that others run on, or fewer.
        (4, 2, 4, 4, False),
        (16, 8, 3, 3, True),
    ],
)
def test_threads_take_the_cores_that_fronts_leave(
    num_cores: int, num_fronts: int, wanted: int | None, num_threads: int, is_alone: bool
) -> None:
    plan = plan_threads(num_cores=num_cores, num_fronts=num_fronts, num_threads=wanted, environ={})

    assert plan.num_threads == num_threads
    assert plan.environment["OMP_NUM_THREADS"] == str(num_threads)
    assert plan.environment["GOMP_SPINCOUNT"] == ("5000" if is_alone else "1000")


@pytest.mark.parametrize(
    ("environ", "wanted", "environment", "line"),
    [
        # More threads than are free do not spin for long, whoever asked for them.
        ({"OMP_NUM_THREADS": "4,1"}, None, {"GOMP_SPINCOUNT": "1000"}, "4 threads (1000 spins)"),
        ({"OMP_NUM_THREADS": "4"}, 2, {"GOMP_SPINCOUNT": "5000"}, "2 threads (5000 spins)"),
        # A number of spins would override the operator's policy.
        ({"OMP_WAIT_POLICY": "active"}, None, {}, "2 threads (active)"),
        ({"GOMP_SPINCOUNT": "7"}, None, {}, "2 threads (7 spins)"),
    ],
)
def test_variables_of_the_operator_take_precedence(
    environ: dict[str, str], wanted: int | None, environment: dict[str, str], line: str
) -> None:
    plan = plan_threads(num_cores=4, num_fronts=2, num_threads=wanted, environ=environ)

    found = plan.environment
    assert found.pop("OMP_NUM_THREADS") == str(plan.num_threads)
    assert found == environment | ({"OMP_WAIT_POLICY": "passive"} if environment else {})
    assert describe_threads(plan.num_threads, found | environ) == line


def test_a_small_layer_is_computed_by_one_thread_and_the_others_come_back() -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    from penstock.executor.torch.cpu.step_threads import threads_for

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(1 << 30, 0, barrier_us=1.0):
            assert torch.get_num_threads() == 2
        with threads_for(0, 1 << 24, barrier_us=1.0):
            assert torch.get_num_threads() == 2
        with threads_for(1000, 1000, barrier_us=1.0):
            assert torch.get_num_threads() == 1
        # Beside others threads wait for each other longer than they compute.
        with threads_for(0, 1 << 20, barrier_us=50.0):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
