"""How callers are authenticated; in doubt, a caller is rejected."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import jwt
import pytest

from penstock.server.security import web_tokens
from penstock.server.security.authenticator import (
    Authenticator,
    InvalidCredentials,
    MissingCredentials,
    TenantNotListed,
)
from penstock.server.security.rights import Right
from support.authority import AUDIENCE, ISSUER, TokenIssuer, replace_file
from support.security_files import digest

NOW_S = 1_800_000_000.0
ACME, OTHER, OLD = "acme-token-1", "other-token-1", "old-token-1"


POLICY = f"""
version = 1
[tenants.acme]
max_priority = 5
tokens = [
    {{ sha256 = "{digest(ACME)}" }},
    {{ sha256 = "{digest(OLD)}", expires = 2027-01-15T08:00:00Z }},
]
certificates = ["cn:acme", "dns:acme.test"]
[tenants.other]
tokens = [{{ sha256 = "{digest(OTHER)}" }}]
certificates = ["uri:spiffe://test/other"]
"""
JWT = f"""
[jwt]
jwks_file = "keys.json"
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
leeway_s = 10
"""


class Harness:
    """An authenticator with a policy file in a folder, and a clock that the test sets."""

    def __init__(self, folder: Path, policy: str = POLICY + JWT) -> None:
        self.issuer = TokenIssuer(folder)
        self.policy_file = folder / "policy.toml"
        self.policy_file.write_text(policy, encoding="utf-8")
        self.now_s = NOW_S
        self.authenticator = Authenticator(
            self.policy_file, has_client_certificates=True, clock=lambda: self.now_s
        )

    def token(self, algorithm: str = "ES256", **claims: Any) -> str:
        return self.issuer.token(algorithm, now_s=self.now_s, **claims)

    def tenant(self, *tokens: str, names: tuple[str, ...] = ()) -> str:
        headers = [f"Bearer {token}" for token in tokens]
        return self.authenticator.identify(headers, lambda: names).tenant

    def is_unknown(self, *tokens: str, names: tuple[str, ...] = ()) -> bool:
        try:
            self.tenant(*tokens, names=names)
        except InvalidCredentials as error:
            why = str(error)
        else:
            return False
        parts = [part for token in tokens for part in token.split(".") if len(part) > 8]
        assert not [part for part in parts if part in why]
        return True


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_a_token_is_a_tenant_with_its_rights(harness: Harness) -> None:
    caller = harness.authenticator.identify([f"Bearer {ACME}"], tuple)
    assert (caller.tenant, caller.ceilings.scheduling) == ("acme", 5)
    assert Right.GENERATE in caller.rights
    assert Right.OPERATIONS_READ not in caller.rights
    assert harness.tenant(OTHER) == "other"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_is_read_as_the_standard_has_it(harness: Harness, scheme: str) -> None:
    assert harness.authenticator.identify([f"{scheme} {ACME}"], tuple).tenant == "acme"


@pytest.mark.parametrize(
    "header",
    [
        "",
        ACME,
        "Bearer",
        "Bearer ",
        f"Basic {ACME}",
        f"Bearer {ACME} ",
        f"Bearer {ACME},Bearer {ACME}",
        f"Bearer {ACME} {OTHER}",
        f"Bearer {ACME[:-1]}",
        f"Bearer {ACME}x",
        f"Bearer {ACME.upper()}",
        f"Bearer {digest(ACME)}",
        "Bearer \x00",
        "Bearer é",
        "Bearer a.b.c",
    ],
)
def test_anything_else_is_unauthenticated(harness: Harness, header: str) -> None:
    with pytest.raises(InvalidCredentials):
        harness.authenticator.identify([header], tuple)


def test_two_tokens_or_none_are_unauthenticated(harness: Harness) -> None:
    assert harness.is_unknown()
    assert harness.is_unknown(ACME, ACME)
    assert harness.is_unknown(ACME, OTHER)


@pytest.mark.parametrize(
    ("header", "name", "is_missing"),
    [(None, None, True), (None, "cn:unlisted", False), ("Bearer x", None, False)],
)
def test_a_call_without_credentials_differs_from_one_with_invalid_ones(
    harness: Harness, header: str | None, name: str | None, is_missing: bool
) -> None:
    with pytest.raises(InvalidCredentials) as caught:
        harness.authenticator.identify(
            [] if header is None else [header], lambda: [] if name is None else [name]
        )
    assert isinstance(caught.value, MissingCredentials) is is_missing


def test_a_static_token_expires(harness: Harness) -> None:
    assert harness.now_s == 1_800_000_000.0, "2027-01-15T08:00:00Z"
    assert harness.is_unknown(OLD)
    harness.now_s -= 1
    assert harness.tenant(OLD) == "acme"


def test_certificates_by_their_names(harness: Harness) -> None:
    assert harness.tenant(names=("cn:acme", "dns:localhost")) == "acme"
    assert harness.tenant(names=("dns:acme.test",)) == "acme"
    assert harness.tenant(names=("uri:spiffe://test/other",)) == "other"
    assert harness.is_unknown(names=("dns:acme", "cn:acme.test")), (
        "a name of one kind is no other's"
    )
    assert harness.is_unknown(names=("cn:acme", "uri:spiffe://test/other")), "of two tenants"
    assert harness.is_unknown(names=("cn:stranger",))


def test_a_token_and_a_certificate_must_agree(harness: Harness) -> None:
    assert harness.tenant(ACME, names=("cn:acme",)) == "acme"
    assert harness.tenant(ACME, names=("cn:proxy",)) == "acme", "of nobody that the policy knows"
    assert harness.is_unknown(ACME, names=("uri:spiffe://test/other",))
    assert harness.is_unknown("wrong", names=("cn:acme",)), "a good certificate saves no bad token"


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_web_tokens_of_each_kind(harness: Harness, algorithm: str) -> None:
    assert harness.tenant(harness.token(algorithm)) == "acme"
    assert harness.tenant(harness.token(algorithm, sub="other", aud=["x", AUDIENCE])) == "other"


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://else.test"},
        {"iss": None},
        {"aud": "else"},
        {"aud": None},
        {"exp": None},
        {"exp": NOW_S - 10},
        {"exp": "soon"},
        {"exp": True},
        {"exp": 10**400},
        {"exp": math.inf},
        {"exp": math.nan},
        {"nbf": math.nan},
        {"nbf": -math.inf},
        {"nbf": NOW_S + 11},
        {"nbf": "later"},
        {"sub": None},
        {"sub": ""},
        {"sub": "a,b"},
        {"sub": "x" * 129},
        {"sub": "acme\x1f"},
    ],
)
def test_invalid_claims_are_rejected(harness: Harness, claims: dict[str, Any]) -> None:
    try:
        token = harness.token(**claims)
    except TypeError:
        # The library rejects to sign what is no text; others do not.
        pytest.skip("cannot be made")
    assert harness.is_unknown(token)


def test_the_leeway_is_for_clocks(harness: Harness) -> None:
    assert harness.tenant(harness.token(exp=NOW_S - 9)) == "acme"
    assert harness.tenant(harness.token(nbf=NOW_S + 9)) == "acme"


def test_a_web_token_is_not_remembered_beyond_its_end(harness: Harness) -> None:
    token = harness.token(exp=NOW_S + 60)
    assert harness.tenant(token) == harness.tenant(token) == "acme"
    harness.now_s += 69.9
    assert harness.tenant(token) == "acme"
    harness.now_s += 0.2
    assert harness.is_unknown(token)


def test_invalid_signatures_are_rejected(harness: Harness, tmp_path: Path) -> None:
    good = harness.token()
    head, body, signature = good.split(".")
    (tmp_path / "else").mkdir()
    foreign = TokenIssuer(tmp_path / "else")
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": NOW_S + 300}
    unsigned = jwt.encode(claims, "", algorithm="none")
    key = json.dumps(harness.issuer.jwks()["keys"][0])
    shared = jwt.encode(claims, key * 2, algorithm="HS256", headers={"kid": "key-RS256"})
    for token in (
        f"{head}.{body}.{'A' * len(signature)}",
        f"{head}.{body}.",
        f"{head}.{harness.token(sub='other').split('.')[1]}.{signature}",
        foreign.token(now_s=NOW_S),
        unsigned,
        shared,
        harness.issuer.token(now_s=NOW_S, headers={"kid": "unknown"}),
        harness.issuer.token(now_s=NOW_S, headers={"kid": "key-RS256"}),
        harness.issuer.token(now_s=NOW_S, headers={"crit": ["exp"]}),
        "a" * (web_tokens.MAX_TOKEN_BYTES + 1) + ".b.c",
    ):
        assert harness.is_unknown(token)
    assert harness.tenant(good) == "acme"


def test_a_tenant_that_is_not_listed_is_authenticated_but_not_authorised(harness: Harness) -> None:
    with pytest.raises(TenantNotListed):
        harness.tenant(harness.token(sub="stranger"))


def test_unlisted_tenants_may_be_admitted(tmp_path: Path) -> None:
    harness = Harness(tmp_path, POLICY + JWT + "allow_unlisted_tenants = true\n")
    assert harness.tenant(harness.token(sub="stranger")) == "stranger"


def test_the_cache_of_verified_tokens_is_bounded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_tokens, "MAX_REMEMBERED", 3)
    tokens = [harness.token(jti=str(number)) for number in range(5)]
    assert {harness.tenant(token) for token in tokens} == {"acme"}
    known = harness.authenticator._index._web_tokens
    assert known is not None
    assert len(known._verified) == 3
    assert {harness.tenant(token) for token in tokens} == {"acme"}


def test_a_new_policy_applies_at_once_and_an_invalid_one_never(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replace_file(harness.policy_file, (POLICY + JWT).replace(digest(ACME), digest("new-token")))
    harness.authenticator.poll()
    assert harness.is_unknown(ACME)
    assert harness.tenant("new-token") == "acme"

    for broken in ("version = 1\nnonsense = 2", "\xff", "version = 1", ""):
        replace_file(harness.policy_file, broken.encode("latin-1"))
        caplog.clear()
        harness.authenticator.poll()
        harness.authenticator.poll()
        assert harness.tenant("new-token") == "acme"
        assert [record.levelname for record in caplog.records] == ["ERROR"], "told once"
    harness.policy_file.unlink()
    harness.authenticator.poll()
    assert harness.tenant("new-token") == "acme"

    replace_file(harness.policy_file, POLICY + JWT)
    harness.authenticator.poll()
    assert harness.tenant(ACME) == "acme"
    assert harness.is_unknown("new-token")


def test_new_keys_apply_at_once_and_invalidate_cached_tokens_of_old_ones(harness: Harness) -> None:
    old = harness.token()
    assert harness.tenant(old) == "acme"
    replace_file(harness.issuer.jwks_file, b"{")
    harness.authenticator.poll()
    assert harness.tenant(old) == "acme"
    new = TokenIssuer(harness.policy_file.parent, prefix="new")
    harness.authenticator.poll()
    assert harness.is_unknown(old)
    assert harness.tenant(new.token(now_s=NOW_S)) == "acme"


def test_a_policy_waits_for_its_key_set(harness: Harness) -> None:
    moved = (POLICY + JWT).replace("keys.json", "more.json").replace(digest(ACME), digest("n"))
    replace_file(harness.policy_file, moved)
    harness.authenticator.poll()
    assert harness.tenant(ACME) == "acme", "of the policy before"
    harness.issuer.jwks_file.rename(harness.issuer.jwks_file.with_name("more.json"))
    harness.authenticator.poll()
    assert harness.tenant("n") == "acme"
    assert harness.tenant(harness.token()) == "acme"


@pytest.mark.parametrize(
    ("jwks", "wanted"),
    [
        ("{", "is not JSON"),
        ("[]", "keys must be an array"),
        ('{"keys": []}', "has no key for"),
        ('{"keys": [1]}', r"keys\[0\] must be an object"),
        ('{"keys": [{"kty": "oct", "k": "aGVsbG8"}]}', "a shared secret"),
        ('{"keys": [{"kty": "RSA", "n": "AQ", "e": "AQAB", "d": "AQ"}]}', "a private key"),
        (
            '{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}',
            "is not a key for ES256",
        ),
    ],
)
def test_invalid_key_sets_are_rejected(tmp_path: Path, jwks: str, wanted: str) -> None:
    TokenIssuer(tmp_path).jwks_file.write_text(jwks)
    (tmp_path / "policy.toml").write_text(POLICY + JWT)
    with pytest.raises(ValueError, match=wanted) as caught:
        Authenticator(tmp_path / "policy.toml", has_client_certificates=True)
    assert "keys.json" in str(caught.value)


def test_certificates_need_mutual_tls(tmp_path: Path) -> None:
    TokenIssuer(tmp_path)
    (tmp_path / "policy.toml").write_text(POLICY + JWT)
    with pytest.raises(ValueError, match=r"tenants\.\w+\.certificates requires --tls-client-ca"):
        Authenticator(tmp_path / "policy.toml", has_client_certificates=False)


def test_a_missing_package_is_named(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)
    with pytest.raises(ValueError, match=r"'\.\[jwt\]"):
        Authenticator(harness.policy_file, has_client_certificates=True)
