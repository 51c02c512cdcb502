"""The number of compute threads, how they wait, and when a single thread computes a layer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

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
        # An operator may set more threads, also on cores that others use, or fewer.
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
        # If there are more threads than free cores, they spin only briefly, even if the operator
        # set their number.
        ({"OMP_NUM_THREADS": "4,1"}, None, {"GOMP_SPINCOUNT": "1000"}, "4 threads (1000 spins)"),
        ({"OMP_NUM_THREADS": "4"}, 2, {"GOMP_SPINCOUNT": "5000"}, "2 threads (5000 spins)"),
        # A number of spins would override the operator's policy.
        ({"OMP_WAIT_POLICY": "active"}, None, {}, "2 threads (active)"),
        ({"GOMP_SPINCOUNT": "7"}, None, {}, "2 threads (7 spins)"),
        # A blank one counts as unset.
        (
            {"OMP_NUM_THREADS": " ", "OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": ""},
            None,
            {"GOMP_SPINCOUNT": "5000"},
            "2 threads (5000 spins)",
        ),
    ],
)
def test_variables_of_the_operator_take_precedence(
    environ: dict[str, str], wanted: int | None, environment: dict[str, str], line: str
) -> None:
    plan = plan_threads(num_cores=4, num_fronts=2, num_threads=wanted, environ=environ)

    found = plan.environment
    assert found.pop("OMP_NUM_THREADS") == str(plan.num_threads)
    assert found == environment | ({"OMP_WAIT_POLICY": "passive"} if environment else {})
    assert describe_threads(plan.num_threads, environ | found) == line


@pytest.fixture
def two_threads() -> Generator[Any]:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("multiplications", "num_bytes", "barrier_us", "expected"),
    [
        (1 << 30, 0, 1.0, 2),
        (0, 1 << 24, 1.0, 2),
        (1000, 1000, 1.0, 1),
        # Next to others threads wait for each other longer than they compute.
        (0, 1 << 20, 50.0, 1),
    ],
)
def test_a_small_layer_is_computed_by_one_thread_and_the_others_return(
    multiplications: int, num_bytes: int, barrier_us: float, expected: int, two_threads: Any
) -> None:
    from penstock.executor.torch.cpu.step_threads import StepThreads

    threads = StepThreads(lambda: barrier_us)

    with threads.computing(multiplications, num_bytes):
        assert two_threads.get_num_threads() == expected
    assert two_threads.get_num_threads() == 2


def test_threads_are_used_again_when_a_neighbour_has_gone(two_threads: Any) -> None:
    from penstock.executor.torch.cpu.step_threads import StepThreads

    now, measured = 0.0, [50.0, 50.0]
    threads = StepThreads(lambda: measured.pop() if measured else 1.0, lambda: now)
    found = []
    for _ in range(8):
        now += 1.0
        with threads.computing(0, 1 << 20):
            found.append(two_threads.get_num_threads())

    assert found == [1, 1, 1, 1, 2, 2, 2, 2]
