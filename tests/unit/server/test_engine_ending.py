"""Which exception ended an engine: the log distinguishes executor and scheduler."""

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.scheduler.config import SchedulerConfig
from penstock.server.processes.engine_process import comes_from_executor


def test_what_passed_through_an_executor_is_its() -> None:
    with pytest.raises(ValueError, match="block_size") as caught:
        ExecutorConfig(kind=ExecutorKind.SIMULATED, block_size=0)
    assert comes_from_executor(caught.value)


def test_what_the_scheduler_raised_by_itself_is_not() -> None:
    with pytest.raises(ValueError, match="aging_s") as caught:
        SchedulerConfig(aging_s=0.0)
    assert not comes_from_executor(caught.value)


def test_what_was_never_raised_is_nobodys() -> None:
    assert not comes_from_executor(ValueError())
