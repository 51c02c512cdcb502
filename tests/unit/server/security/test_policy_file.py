"""All processes that read a policy and its key set agree on whether to accept them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.scheduler.quotas import TenantQuota
from penstock.server.processes.engine_process import EnginePolicy
from penstock.server.security.authenticator import Authenticator, InvalidCredentials
from penstock.server.security.policy_file import PolicyFile
from support.authority import AUDIENCE, ISSUER, TokenIssuer, replace_file
from support.core import make_engine


def policy_of(max_num_live: int, jwks_file: str = "keys.json", more: str = "") -> str:
    return f"""
version = 1
[tenants.acme]
max_num_live = {max_num_live}
{more}
[jwt]
jwks_file = "{jwks_file}"
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
"""


CERTIFICATES = 'certificates = ["cn:acme"]'


class Harness:
    """A policy file with its keys, and its two readers: an engine and an authenticator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.issuer = TokenIssuer(folder)
        self.file = folder / "policy.toml"
        self.file.write_text(policy_of(7), encoding="utf-8")
        self._engine, _ = make_engine()
        self._policy = EnginePolicy(self._engine, lambda: PolicyFile(self.file))
        self._judge = Authenticator(self.file, has_client_certificates=False)

    def poll(self) -> None:
        self._policy.poll()
        self._judge.poll()

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The limits of live requests of tenant acme: in the engine, and in the authenticator's
        policy.
        """
        quotas = self._engine.quotas
        judged = self._judge.policy.tenant_policy("acme").quota
        return quotas.quota_of("acme").max_num_live, judged.max_num_live

    def knows(self, token: str) -> bool:
        try:
            return self._judge.identify([f"Bearer {token}"], tuple).tenant == "acme"
        except InvalidCredentials:
            return False


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (policy_of(1, "none.json"), "none.json"),
        (policy_of(1, "broken.json"), "broken.json: is not JSON"),
        (policy_of(1, more=CERTIFICATES), "tls-client-ca"),
        (policy_of(0), "tenants.acme.max_num_live"),
    ],
)
def test_a_policy_that_fronts_reject_does_not_change_the_engine(
    harness: Harness, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    caplog.set_level(logging.INFO)
    (harness.folder / "broken.json").write_text("{", encoding="utf-8")
    replace_file(harness.file, text)
    for _ in range(3):
        harness.poll()
        assert harness.limits == (7, 7)
    errors = messages(caplog, logging.ERROR)
    assert len(errors) == 2, "one of each reader"
    assert all(why in error for error in errors)
    assert not messages(caplog, logging.INFO), "nothing new holds"
    replace_file(harness.file, policy_of(3))
    harness.poll()
    assert harness.limits == (3, 3)
    assert messages(caplog, logging.INFO) == ["a new policy is in force, with 1 tenants"] * 2


def test_a_policy_is_logged_as_in_force_after_it_is_applied(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = PolicyFile(harness.file)
    replace_file(harness.file, policy_of(3))
    logged_before: list[list[str]] = []

    assert file.poll(lambda: logged_before.append(messages(caplog, logging.INFO)))

    assert logged_before == [[]]
    assert messages(caplog, logging.INFO) == ["a new policy is in force, with 1 tenants"]


def test_a_rejected_policy_applies_once_its_key_set_exists(harness: Harness) -> None:
    replace_file(harness.file, policy_of(1, "late.json"))
    harness.poll()
    assert harness.limits == (7, 7)
    harness.issuer.jwks_file.rename(harness.folder / "late.json")
    harness.poll()
    assert harness.limits == (1, 1)


def test_a_rejected_policy_that_is_reverted_is_forgotten(harness: Harness) -> None:
    replace_file(harness.file, policy_of(1, "late.json"))
    harness.poll()
    replace_file(harness.file, policy_of(7))
    harness.poll()
    (harness.folder / "late.json").write_bytes(harness.issuer.jwks_file.read_bytes())
    harness.poll()
    assert harness.limits == (7, 7)


def test_keys_are_rotated_while_a_newer_policy_is_rejected(harness: Harness) -> None:
    old = harness.issuer.token()
    assert harness.knows(old)
    replace_file(harness.file, policy_of(1, "none.json"))
    harness.poll()
    new = TokenIssuer(harness.folder, prefix="new")
    harness.poll()
    assert harness.limits == (7, 7)
    assert not harness.knows(old), "its key was rotated out"
    assert harness.knows(new.token())


def test_an_engine_that_replaces_another_limits_tenants_without_the_keys(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    keys = harness.issuer.jwks_file.read_bytes()
    harness.issuer.jwks_file.unlink()
    with pytest.raises(OSError, match=r"keys\.json"):
        PolicyFile(harness.file)
    file = PolicyFile(harness.file, needs_keys=False)
    assert file.policy.tenant_policy("acme").quota == TenantQuota(max_num_live=7)
    assert any("keys.json" in error for error in messages(caplog, logging.ERROR))
    replace_file(harness.issuer.jwks_file, keys)
    assert file.poll()
    assert file.keys is not None
    replace_file(harness.file, policy_of(1, "none.json"))
    assert not file.poll(), "a newer one needs its keys"
