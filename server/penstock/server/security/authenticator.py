"""Authenticates callers by a bearer token, a certificate, or both.

Uses the current policy file and the signature keys that it names. Uses neither gRPC nor HTTP.
Missing, invalid or contradictory credentials are rejected.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Final

from penstock.server.security.policy import Policy, StaticToken
from penstock.server.security.policy_file import PolicyFile
from penstock.server.security.rights import Caller
from penstock.server.security.web_tokens import BadToken, KeySet, WebTokens

_BEARER: Final = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*)", re.IGNORECASE | re.ASCII)
Names = Callable[[], Iterable[str]]
"""Returns the names in the caller's certificate, written as in a policy file (`cn:NAME`). Called
only if needed."""


class InvalidCredentials(Exception):
    """The caller has no valid credentials. The message is for the log, not for the caller."""


class MissingCredentials(InvalidCredentials):
    """The caller has neither a token nor, if the policy lists certificates, a certificate."""


class TenantNotListed(Exception):
    """The caller is authenticated, but the policy neither lists its tenant nor accepts unlisted
    tenants."""


class Authenticator:
    """Authenticates callers by a policy file. `clock` returns the time of day in Unix seconds.

    `has_client_certificates` is True if TLS is mutual, so that callers have certificates. The
    constructor raises ValueError or OSError if the policy, or its set of keys for JSON Web Tokens,
    is invalid.
    """

    def __init__(
        self,
        policy_file: Path,
        *,
        has_client_certificates: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._file = PolicyFile(policy_file, has_client_certificates=has_client_certificates)
        self._index = self._prepare()

    @property
    def policy(self) -> Policy:
        """The latest valid policy that was read from the file."""
        return self._index.policy

    def poll(self) -> None:
        """Reload the policy and its key set if a file has changed. An invalid file is logged and
        ignored."""
        self._file.poll(self._renew_index)

    def _renew_index(self) -> None:
        self._index = self._prepare()

    def identify(self, authorizations: list[str], names: Names) -> Caller:
        """Return the caller with these Authorization headers and certificate names.

        Raises InvalidCredentials without valid credentials (MissingCredentials without any), and
        TenantNotListed if the policy does not accept the tenant. If a token is sent, it must be
        valid, even if the certificate is valid too. A token and a certificate of two different
        tenants are rejected, because one of them is probably stolen.
        """
        index = self._index
        by_token = self._by_token(index, authorizations) if authorizations else None
        by_certificate = index.tenant_of_names(names) if index.policy.certificates else None
        if by_token is None:
            if by_certificate is not None:
                return index.caller(by_certificate)
            if index.policy.certificates and any(names()):
                raise InvalidCredentials("a certificate that the policy does not list")
            raise MissingCredentials("no credentials")
        if by_certificate is not None and by_certificate != by_token:
            raise InvalidCredentials("a token and a certificate of two tenants")
        return index.caller(by_token)

    def _prepare(self) -> "_PolicyIndex":
        return _PolicyIndex(self._file.policy, self._file.keys, self._clock)

    def _by_token(self, index: "_PolicyIndex", authorizations: list[str]) -> str:
        if len(authorizations) > 1:
            raise InvalidCredentials("more than one authorization")
        match = _BEARER.fullmatch(authorizations[0])
        if match is None:
            raise InvalidCredentials("an authorization that is not a bearer token")
        return index.tenant_of_token(match[1].encode("ascii"))


class _PolicyIndex:
    """A policy, with an index of its static tokens and a validator of its JSON Web Tokens."""

    def __init__(self, policy: Policy, keys: KeySet | None, clock: Callable[[], float]) -> None:
        self.policy = policy
        self._clock = clock
        self._tokens = _StaticTokens(policy.tokens)
        self._web_tokens: WebTokens | None = None
        if policy.jwt is not None and keys is not None:
            self._web_tokens = WebTokens(policy.jwt, keys, clock)

    def caller(self, tenant: str) -> Caller:
        policy = self.policy
        listed = policy.tenants.get(tenant)
        if listed is None:
            if policy.jwt is None or not policy.jwt.allow_unlisted_tenants:
                raise TenantNotListed("a tenant that the policy does not list")
            listed = policy.default
        return listed.caller(tenant)

    def tenant_of_token(self, token: bytes) -> str:
        found = self._tokens.find(token)
        if found is not None:
            if self._clock() >= found.expires_unix_s:
                raise InvalidCredentials("a token that has expired")
            return found.tenant
        if self._web_tokens is None or token.count(b".") != 2:
            raise InvalidCredentials("an unknown token")
        try:
            return self._web_tokens.tenant_of(token)
        except BadToken as error:
            raise InvalidCredentials(str(error)) from None

    def tenant_of_names(self, names: Names) -> str | None:
        """Return the tenant of the certificate with these names; None if the policy lists none of
        them.

        Raises InvalidCredentials if the names belong to several tenants.
        """
        known = self.policy.certificates
        found = {known[name] for name in names() if name in known}
        if len(found) > 1:
            raise InvalidCredentials("a certificate of several tenants")
        return found.pop() if found else None


class _StaticTokens:
    """Static bearer tokens, indexed by a keyed hash. Stores only hashes of tokens.

    The duration of a look-up reveals nothing about valid tokens, because they are found by a hash
    with a random key, and their hashes are then compared in constant time.
    """

    def __init__(self, tokens: Iterable[StaticToken]) -> None:
        self._key = secrets.token_bytes(32)
        self._tokens = {self._keyed_hash(token.digest): token for token in tokens}

    def find(self, token: bytes) -> StaticToken | None:
        """Return the policy's entry for a token, even if the token has expired; None for an unknown
        token."""
        digest = sha256(token).digest()
        found = self._tokens.get(self._keyed_hash(digest))
        if found is None or not hmac.compare_digest(found.digest, digest):
            return None
        return found

    def _keyed_hash(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._key, digest_size=16).digest()
