"""The tenants' limits from the policy file reach the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.server.processes.engine_process import EnginePolicy
from penstock.server.security.policy import Policy, TenantPolicy
from penstock.server.security.policy_file import PolicyFile
from support.core import make_engine


class ScriptedFile(PolicyFile):
    """A file whose policy the test sets."""

    def __init__(self, policy: Policy) -> None:  # there is no file behind it
        self.policy = policy
        self.next: Policy | None = None

    def poll(self) -> bool:
        if self.next is None:
            return False
        self.policy, self.next = self.next, None
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
