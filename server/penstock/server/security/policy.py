"""The policy: tenants with their rights, limits and credentials, as one immutable value.

Defines the values and validates them. `policy_file` parses them, and the authenticator applies
them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from penstock.scheduler.config import TENANT_WEIGHT
from penstock.scheduler.quotas import TenantQuota
from penstock.scheduler.setting import SettingError, check, setting
from penstock.server.security.rights import CLIENT_RIGHTS, Caller, Right
from penstock.server.tenants import MAX_PRIORITY, PriorityCeilings

JWT_ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
"""Asymmetric signatures only: with a shared key, any verifier could create tokens."""
MAX_LEEWAY_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy(TenantQuota):
    """The rights and limits of one tenant. An invalid value raises SettingError, which names the
    field.

    `max_priority` limits the priority of a request in the queue. `max_retention_level` limits the
    retention priority of the request's blocks in the prefix cache. A request with a higher value is
    accepted, and the value is lowered to the limit. `weight` is the tenant's weight under fair
    scheduling.
    """

    rights: frozenset[Right] = CLIENT_RIGHTS
    max_priority: int = setting(0, at_least=-MAX_PRIORITY, at_most=MAX_PRIORITY)
    max_retention_level: int = setting(MAX_PRIORITY, at_least=0, at_most=MAX_PRIORITY)
    weight: float = setting(1.0, at_least=TENANT_WEIGHT.at_least, at_most=TENANT_WEIGHT.at_most)

    @property
    def quota(self) -> TenantQuota:
        """The tenant's limits, without its rights, maximum priorities and weight."""
        return TenantQuota(**{item.name: getattr(self, item.name) for item in fields(TenantQuota)})

    def caller(self, tenant: str) -> Caller:
        """Return the caller of tenant `tenant`, with the rights and maximum priorities of this
        policy."""
        ceilings = PriorityCeilings(self.max_priority, self.max_retention_level)
        return Caller(tenant=tenant, rights=self.rights, ceilings=ceilings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticToken:
    """A bearer token, stored only as its SHA-256. If `expires_unix_s` is infinite, it never
    expires."""

    digest: bytes
    tenant: str
    expires_unix_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtPolicy:
    """The rules for accepting JSON Web Tokens (RFC 7519), and the claim that names the tenant.

    A token must be signed by a key of `jwks_file` (RFC 7517) with one of `algorithms`, and be
    issued by `issuer` for `audience`. It must be neither expired nor used before its start time,
    with a tolerance of `leeway_s` seconds. If `allow_unlisted_tenants`, tenants that the policy
    does not list get its default rights and limits instead of being rejected. An invalid value
    raises SettingError, which names the field.
    """

    jwks_file: Path
    issuer: str
    audience: str
    tenant_claim: str = "sub"
    algorithms: tuple[str, ...] = JWT_ALGORITHMS
    leeway_s: float = setting(30.0, at_least=0, at_most=MAX_LEEWAY_S)
    allow_unlisted_tenants: bool = False

    def __post_init__(self) -> None:
        check(self)
        for name in ("issuer", "audience", "tenant_claim"):
            if not getattr(self, name):
                raise SettingError("{} must not be empty", name)
        others = [name for name in self.algorithms if name not in JWT_ALGORITHMS]
        if others or not self.algorithms:
            found = f", not {others[0]!r}" if others else ""
            raise SettingError(
                f"{{}} must be some of {', '.join(JWT_ALGORITHMS)}{found}", "algorithms"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy: its tenants and credentials.

    `default` applies to tenants that the policy does not list, if they are accepted. `certificates`
    maps a name in a certificate, with its kind (such as `cn:NAME` or `dns:NAME`), to the tenant.
    """

    default: TenantPolicy = field(default_factory=TenantPolicy)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict[str, TenantPolicy])
    tokens: tuple[StaticToken, ...] = ()
    certificates: Mapping[str, str] = field(default_factory=dict[str, str])
    jwt: JwtPolicy | None = None

    @property
    def has_credentials(self) -> bool:
        """True if the policy accepts tokens, certificates or JSON Web Tokens."""
        return bool(self.tokens or self.certificates or self.jwt is not None)

    def tenant_policy(self, tenant: str) -> TenantPolicy:
        """Return the policy of a tenant; `default` for an unlisted one."""
        return self.tenants.get(tenant, self.default)

    @property
    def quotas(self) -> Mapping[str, TenantQuota]:
        """The limits of the listed tenants, by name. `default.quota` applies to the others."""
        return {name: tenant.quota for name, tenant in self.tenants.items()}

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the listed tenants, by name. `default.weight` applies to the others."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}
