"""The engine process takes limits from the policy file, warns of low ones, and reports which part
raised the exception that ended it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.server.processes.engine_process import (
    EnginePolicy,
    comes_from_executor,
    warn_of_limits,
)
from penstock.server.security.policy import Policy, TenantPolicy
from penstock.server.security.policy_file import PolicyFile
from support.core import make_engine


def test_an_exception_that_passed_through_executor_code_is_attributed_to_it() -> None:
    with pytest.raises(ValueError, match="block_size") as caught:
        ExecutorConfig(kind=ExecutorKind.SIMULATED, block_size=0)
    assert comes_from_executor(caught.value)


def test_an_exception_of_the_scheduler_is_not_attributed_to_the_executor() -> None:
    with pytest.raises(ValueError, match="aging_s") as caught:
        SchedulerConfig(aging_s=0.0)
    assert not comes_from_executor(caught.value)


def test_an_exception_that_was_never_raised_is_not_attributed_to_the_executor() -> None:
    assert not comes_from_executor(ValueError())


@pytest.mark.parametrize(
    ("asked", "num_blocks", "numbers"),
    [
        (None, 64, []),
        (1024, 64, []),
        (5000, 64, [("1024", "5000")]),
        (None, 1, [("16 tokens", "1024")]),
        (5000, 63, [("1024", "5000"), ("1008 tokens", "1024")]),
    ],
)
def test_limits_below_what_was_asked_for_are_reported(
    asked: int | None,
    num_blocks: int,
    numbers: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = ExecutorConfig(kind=ExecutorKind.SIMULATED, max_seq_len=asked)
    info = ExecutorInfo(
        name="any",
        vocab_size=100,
        block_size=16,
        num_blocks=num_blocks,
        max_seq_len=1024,
        max_num_seqs=4,
    )

    warn_of_limits(config, info)

    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(numbers)
    for record, (first, second) in zip(caplog.records, numbers, strict=True):
        assert first in record.getMessage()
        assert second in record.getMessage()


class ScriptedFile(PolicyFile):
    """A policy file whose content the test sets."""

    def __init__(self, policy: Policy) -> None:  # there is no file behind it
        self.policy = policy
        self.next: Policy | None = None

    def poll(self, apply: Callable[[], None] = lambda: None) -> bool:
        if self.next is None:
            return False
        self.policy, self.next = self.next, None
        apply()
        return True


def policy_of(limit: int, weight: float) -> Policy:
    return Policy(
        default=TenantPolicy(max_requests_per_minute=9),
        tenants={"a": TenantPolicy(weight=weight, max_num_live=limit)},
    )


def test_limits_hold_from_the_start_and_change_with_the_file() -> None:
    engine, _ = make_engine()
    file = ScriptedFile(policy_of(3, 2.0))
    policy = EnginePolicy(engine, lambda: file)
    accounts = engine.quotas
    assert accounts.quota_of("a") == TenantQuota(max_num_live=3)
    assert accounts.quota_of("b") == TenantQuota(max_requests_per_minute=9)
    policy.poll()
    file.next = policy_of(5, 1.0)
    policy.poll()
    assert accounts.quota_of("a") == TenantQuota(max_num_live=5)


def test_a_first_engine_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    engine, _ = make_engine()
    with pytest.raises(OSError, match="nothing"):
        EnginePolicy(engine, lambda: PolicyFile(tmp_path / "nothing"))


def test_a_later_engine_waits_for_the_file_to_be_good() -> None:
    engine, _ = make_engine()
    broken = True

    def open_file() -> PolicyFile:
        if broken:
            raise ValueError("half written")
        return ScriptedFile(policy_of(3, 1.0))

    policy = EnginePolicy(engine, open_file, can_wait=True)
    policy.poll()
    assert engine.quotas.quota_of("a") == NO_QUOTA
    broken = False
    policy.poll()
    assert engine.quotas.quota_of("a") == TenantQuota(max_num_live=3)
