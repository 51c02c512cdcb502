"""How the policy file is read, and errors that name the place in it."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import pytest

from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.server.security.policy import Policy
from penstock.server.security.policy_file import BadPolicy, parse_policy
from penstock.server.security.rights import CLIENT_RIGHTS, Right
from penstock.server.tenants import PriorityCeilings

FOLDER = Path("/etc/penstock")
DIGEST = hashlib.sha256(b"secret").hexdigest()
WHOLE = f"""
version = 1

[default]
rights = ["generate", "models"]
max_requests_per_minute = 10

[tenants.acme]
max_priority = 10
max_retention_level = 50
weight = 2
max_num_live = 64
max_tokens_per_minute = 200000
tokens = [{{ sha256 = "{DIGEST}", expires = 2030-01-01T00:00:00Z }}]
certificates = ["cn:acme-gateway", "uri:spiffe://prod/acme"]

[tenants."ops team"]
rights = ["operations_read", "operations_write", "metrics"]

[jwt]
jwks_file = "keys.json"
issuer = "https://issuer"
audience = "penstock"
tenant_claim = "tenant"
algorithms = ["ES256"]
leeway_s = 5
allow_unlisted_tenants = true
"""


def parsed(text: str) -> Policy:
    return parse_policy(text, FOLDER)


def test_a_complete_policy_is_read() -> None:
    policy = parsed(WHOLE)
    acme = policy.tenant_policy("acme")
    assert acme.rights == {Right.GENERATE, Right.MODELS}, "of the defaults"
    assert (acme.max_priority, acme.weight) == (10, 2.0)
    assert acme.caller("acme").ceilings == PriorityCeilings(scheduling=10, retention=50)
    assert acme.quota == TenantQuota(
        max_num_live=64, max_requests_per_minute=10, max_tokens_per_minute=200_000
    )
    assert policy.tenant_policy("ops team").rights == {
        Right.OPERATIONS_READ,
        Right.OPERATIONS_WRITE,
        Right.METRICS,
    }
    assert policy.tenant_policy("stranger") == policy.default
    assert policy.quotas["acme"] == acme.quota
    assert policy.weights == {"acme": 2.0, "ops team": 1.0}
    (token,) = policy.tokens
    assert (token.digest.hex(), token.tenant) == (DIGEST, "acme")
    assert token.expires_unix_s == 1893456000
    assert policy.certificates == {"cn:acme-gateway": "acme", "uri:spiffe://prod/acme": "acme"}
    assert policy.jwt is not None
    assert policy.jwt.jwks_file == FOLDER / "keys.json"
    assert policy.jwt.allow_unlisted_tenants
    assert policy.has_credentials


def test_unset_limits_have_modest_defaults() -> None:
    policy = parsed(f'version = 1\n[tenants.a]\ntokens = [{{ sha256 = "{DIGEST}" }}]')
    a = policy.tenant_policy("a")
    assert a.rights == CLIENT_RIGHTS
    assert not a.rights & {Right.OPERATIONS_READ, Right.INSPECT, Right.METRICS}
    assert (a.max_priority, a.weight) == (0, 1.0)
    assert a.quota == NO_QUOTA
    assert policy.tokens[0].expires_unix_s == math.inf
    assert policy.jwt is None
    assert not parsed("version = 1").has_credentials


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "version is missing: write version = 1"),
        ("version = 2", "version must be 1, the only one of this release, not 2"),
        ("version = true", "version must be an integer"),
        ("version = 1\nversion = 1", "is not TOML"),
        ("version = 1\ntenant = 1", "tenant is unknown; did you mean tenants?"),
        ("version = 1\ntenants = 1", "tenants must be a table, not 1; write [tenants]"),
        ("version = 1\n[[tenants]]", "tenants must be a table, not an array; write [tenants]"),
        ("version = 1\ntenants.a = 1", "tenants.a must be a table, not 1; write [tenants.a]"),
        ("version = {}", "version must be an integer, not a table"),
        ("version = 2026-01-31", "version must be an integer, not 2026-01-31"),
        ("version = 1\n[default]\ntokens = []", "default.tokens is unknown"),
        ("version = 1\nquota = 1", "quota is unknown; known are default, jwt, tenants, version"),
        (
            "version = 1\n[tenants.a]\nmax_live = 3",
            "tenants.a.max_live is unknown; did you mean max_num_live?",
        ),
        ('version = 1\n[tenants."a,b"]', "tenants.'a,b' is not a valid tenant name"),
        (
            "version = 1\n[tenants.a]\nmax_num_live = 0",
            "tenants.a.max_num_live must be in 1..1000000000000, not 0",
        ),
        (
            "version = 1\n[tenants.a]\nmax_num_live = true",
            "tenants.a.max_num_live must be an integer in 1..1000000000000, not true",
        ),
        (
            "version = 1\n[tenants.a]\nmax_num_live = 1.5",
            "tenants.a.max_num_live must be an integer in 1..1000000000000, not 1.5",
        ),
        (
            "version = 1\n[tenants.a]\nmax_priority = 101",
            "tenants.a.max_priority must be in -100..100, not 101",
        ),
        (
            "version = 1\n[tenants.a]\nmax_retention_level = 101",
            "tenants.a.max_retention_level must be in",
        ),
        ("version = 1\n[tenants.a]\nweight = 0", "tenants.a.weight must be in"),
        ("version = 1\n[tenants.a]\nweight = nan", "tenants.a.weight must be in"),
        ('version = 1\n[tenants.a]\nweight = "2"', "tenants.a.weight must be a number"),
        ('version = 1\n[tenants.a]\nrights = ["all"]', "tenants.a.rights[0] must be one of"),
        (
            'version = 1\n[tenants.a]\nrights = "generate"',
            "tenants.a.rights must be an array, not 'generate'",
        ),
        ("version = 1\n[tenants.a]\nrights = [1]", "tenants.a.rights[0] must be one of"),
        ("version = 1\n[tenants.a]\ncertificates = ['acme']", "tenants.a.certificates[0] must be"),
        ("version = 1\n[tenants.a]\ncertificates = ['cn:']", "tenants.a.certificates[0] must be"),
        (
            "version = 1\n[tenants.a]\ncertificates = ['cn:x']\n"
            "[tenants.b]\ncertificates = ['cn:x']",
            "tenants.b.certificates[0] occurs twice",
        ),
        (
            f'version = 1\n[tenants.a]\ntokens = [{{ sha256 = "{DIGEST}" }}]\n'
            f'[tenants.b]\ntokens = [{{ sha256 = "{DIGEST}" }}]',
            "tenants.b.tokens[0].sha256 occurs twice",
        ),
        (
            f'version = 1\n[tenants.a]\ntokens = [{{ sha256 = "{DIGEST}", expires = 2030-01-01 }}]',
            "tenants.a.tokens[0].expires must be a time with its zone",
        ),
        (
            f'version = 1\n[tenants.a]\ntokens = [{{ sha256 = "{DIGEST}", expire = 3 }}]',
            "tenants.a.tokens[0].expire is unknown",
        ),
        ('version = 1\n[jwt]\nissuer = "i"', "jwt.jwks_file is missing"),
        (
            'version = 1\n[jwt]\nissuer="i"\naudience="a"\njwks_file="k"\nalgorithms=["HS256"]',
            "jwt.algorithms must be some of RS256, ES256, EdDSA",
        ),
        (
            'version = 1\n[jwt]\nissuer="i"\naudience="a"\njwks_file="k"\nalgorithms=["none"]',
            "jwt.algorithms must be some of",
        ),
        (
            'version = 1\n[jwt]\nissuer=""\naudience="a"\njwks_file="k"',
            "jwt.issuer must not be empty",
        ),
        (
            'version = 1\n[jwt]\nissuer="i"\naudience="a"\njwks_file="k"\nleeway_s=301',
            "jwt.leeway_s must be in 0..300",
        ),
    ],
)
def test_an_invalid_policy_is_rejected_with_the_place_of_the_error(text: str, wanted: str) -> None:
    with pytest.raises(BadPolicy) as caught:
        parsed(text)
    assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize(
    "tokens", ['["hunter2-token"]', '[{ sha256 = "hunter2-token" }]', '"hunter2-token"']
)
def test_a_token_that_was_put_in_place_of_its_hash_is_not_shown(tokens: str) -> None:
    with pytest.raises(BadPolicy) as caught:
        parsed(f"version = 1\n[tenants.a]\ntokens = {tokens}")
    assert "tenants.a.tokens" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_documented_policy_is_valid() -> None:
    page = (Path(__file__).parents[4] / "docs" / "security.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    policy = parsed(example)
    assert policy.tenant_policy("acme").max_priority == 10
    assert len(policy.tokens) == 2
    assert policy.certificates["dns:ops.example"] == "operators"
    assert not [right for right in Right if f"`{right.value}`" not in page]
