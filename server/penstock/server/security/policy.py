"""The policy: tenants with their rights, limits and credentials, as one value that never changes.

Owns the values and what they refuse. Where they were written is `policy_text`'s, how a credential
is judged by them the authenticator's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.scheduler.quotas import TenantQuota
from penstock.server.front.tenants import MAX_PRIORITY, PriorityCeilings
from penstock.server.security.rights import CLIENT_RIGHTS, Caller, Right

MIN_WEIGHT: Final = 1e-6
MAX_WEIGHT: Final = 1e6
JWT_ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
"""Signatures of key pairs only: with a shared key, whoever can check a token can make one."""
MAX_LEEWAY_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """What one tenant may do and use. Raises ValueError naming the field.

    `max_priority`, `max_retention_priority`: a higher priority in the queue, or for blocks in the
    prefix cache, is lowered to this. `weight`: its share under fair order.
    """

    rights: frozenset[Right] = CLIENT_RIGHTS
    max_priority: int = 0
    max_retention_priority: int = MAX_PRIORITY
    weight: float = 1.0
    quota: TenantQuota = field(default_factory=TenantQuota)

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.max_priority <= MAX_PRIORITY:
            raise ValueError(
                f"max_priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY},"
                f" not {self.max_priority}"
            )
        if not 0 <= self.max_retention_priority <= MAX_PRIORITY:
            raise ValueError(
                f"max_retention_priority must be from 0 to {MAX_PRIORITY},"
                f" not {self.max_retention_priority}"
            )
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")

    def caller(self, tenant: str) -> Caller:
        """A caller who is this tenant."""
        ceilings = PriorityCeilings(self.max_priority, self.max_retention_priority)
        return Caller(tenant=tenant, rights=self.rights, ceilings=ceilings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticToken:
    """A bearer token by its SHA-256; `expires_unix_s` infinite for never. Not the token itself."""

    digest: bytes
    tenant: str
    expires_unix_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtPolicy:
    """Which JSON Web Tokens (RFC 7519) are believed, and which of their claims is the tenant.

    Signed by a key of `jwks_file` (RFC 7517) with one of `algorithms`, issued by `issuer` for
    `audience`, not expired and not too early, give or take `leeway_s`. `takes_unlisted_tenants`:
    whom the policy does not list gets its defaults, instead of nothing.
    """

    jwks_file: Path
    issuer: str
    audience: str
    tenant_claim: str = "sub"
    algorithms: tuple[str, ...] = JWT_ALGORITHMS
    leeway_s: float = 30.0
    takes_unlisted_tenants: bool = False

    def __post_init__(self) -> None:
        for name in ("issuer", "audience", "tenant_claim"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if not self.algorithms:
            raise ValueError(f"algorithms must be some of {', '.join(JWT_ALGORITHMS)}")
        for algorithm in self.algorithms:
            if algorithm not in JWT_ALGORITHMS:
                raise ValueError(
                    f"algorithms must be some of {', '.join(JWT_ALGORITHMS)}, not {algorithm!r}"
                )
        if not 0.0 <= self.leeway_s <= MAX_LEEWAY_S:
            raise ValueError(f"leeway_s must be from 0 to {MAX_LEEWAY_S:g}, not {self.leeway_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All of it. `certificates`: the tenant by a name that its certificate has (`cn:NAME`).

    `default` is for tenants that are not listed, where such are let in at all.
    """

    default: TenantPolicy = field(default_factory=TenantPolicy)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict[str, TenantPolicy])
    tokens: tuple[StaticToken, ...] = ()
    certificates: Mapping[str, str] = field(default_factory=dict[str, str])
    jwt: JwtPolicy | None = None

    @property
    def has_credentials(self) -> bool:
        """Whether there is any way to prove who one is."""
        return bool(self.tokens or self.certificates or self.jwt is not None)

    def of(self, tenant: str) -> TenantPolicy:
        """What holds for a tenant, listed or not."""
        return self.tenants.get(tenant, self.default)

    @property
    def quotas(self) -> Mapping[str, TenantQuota]:
        """The limits of the tenants that are listed; `default.quota` holds for the others."""
        return {name: tenant.quota for name, tenant in self.tenants.items()}

    @property
    def weights(self) -> Mapping[str, float]:
        """The shares of the tenants that are listed; `default.weight` holds for the others."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}
