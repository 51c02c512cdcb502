"""Parses a policy: TOML, strictly.

Every error names the place (`tenants.acme.max_priority`) and quotes no value of a credential;
unknown keys are refused, because a misspelt limit is no limit.
"""

import datetime
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, cast

from penstock.executor.config_json import WrongKind, from_json_value
from penstock.scheduler.setting import SettingError
from penstock.server.security.policy import JwtPolicy, Policy, StaticToken, TenantPolicy
from penstock.server.tenants import tenant_fault

VERSION: Final = 1
MAX_POLICY_BYTES: Final = 4 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_CERTIFICATE: Final = re.compile(r"(?:cn|dns|uri|email):\S(?:.*\S)?")


class BadPolicy(ValueError):
    """The text is not a valid policy; the message names the place and contains no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    sha256: str
    expires: datetime.datetime | None = None

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.sha256):
            raise SettingError("{} must be 64 of 0-9 and a-f: the hash, not the token", "sha256")
        if self.expires is not None and self.expires.tzinfo is None:
            raise SettingError("{} must be a time with its zone: 2027-01-31T00:00:00Z", "expires")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant(TenantPolicy):
    tokens: tuple[_Token, ...] = ()
    certificates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        TenantPolicy.__post_init__(self)
        for index, name in enumerate(self.certificates):
            if not _CERTIFICATE.fullmatch(name):
                raise SettingError(
                    f"{{}}[{index}] must be cn:, dns:, uri: or email: and a name", "certificates"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    version: int
    default: TenantPolicy = field(default_factory=TenantPolicy)
    tenants: Mapping[str, _Tenant] = field(default_factory=dict[str, _Tenant])
    jwt: JwtPolicy | None = None

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise SettingError(f"{{}} must be {VERSION}: this release supports no other", "version")


def parse_policy(text: str, folder: Path) -> Policy:
    """The policy of a text; relative paths in it start at `folder`. Raises BadPolicy."""
    try:
        file = from_json_value(_File, _with_defaults(tomllib.loads(text)), "")
    except tomllib.TOMLDecodeError as error:
        # Its message has line and column, and quotes a single character at most.
        raise BadPolicy(f"is not TOML: {error}") from None
    except RecursionError:
        raise BadPolicy("is nested too deep") from None
    except WrongKind as error:
        raise BadPolicy(error.unquoted) from None
    except ValueError as error:
        raise BadPolicy(str(error)) from None
    tokens: dict[bytes, StaticToken] = {}
    certificates: dict[str, str] = {}
    for name, tenant in file.tenants.items():
        where = f"tenants.{name}" if name.isidentifier() else f"tenants.{name!r}"
        fault = tenant_fault(name)
        if fault is not None:
            raise BadPolicy(f"{where} is not a valid tenant name: it {fault}")
        _add_tokens(tenant, where, name, tokens)
        for index, certificate in enumerate(tenant.certificates):
            if certificate in certificates:
                place = f"{where}.certificates[{index}]"
                raise BadPolicy(f"{place} occurs twice: {certificate!r}")
            certificates[certificate] = name
    jwt = file.jwt
    return Policy(
        default=file.default,
        tenants={name: _limits(tenant) for name, tenant in file.tenants.items()},
        tokens=tuple(tokens.values()),
        certificates=certificates,
        jwt=None if jwt is None else replace(jwt, jwks_file=folder / jwt.jwks_file),
    )


def _with_defaults(root: dict[str, Any]) -> dict[str, Any]:
    """Keys that a tenant leaves out are those of `default`."""
    default, tenants = _table(root.get("default")), _table(root.get("tenants"))
    known = {item.name for item in fields(TenantPolicy)}
    base = {name: value for name, value in default.items() if name in known}
    filled = {
        name: {**base, **_table(cast(object, table))} if isinstance(table, dict) else table
        for name, table in tenants.items()
    }
    return {**root, "tenants": filled} if filled else root


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _limits(tenant: _Tenant) -> TenantPolicy:
    return TenantPolicy(**{item.name: getattr(tenant, item.name) for item in fields(TenantPolicy)})


def _add_tokens(tenant: _Tenant, where: str, name: str, tokens: dict[bytes, StaticToken]) -> None:
    for index, token in enumerate(tenant.tokens):
        digest = bytes.fromhex(token.sha256)
        if digest in tokens:
            place = f"{where}.tokens[{index}].sha256"
            raise BadPolicy(f"{place} occurs twice: one token cannot be of two tenants")
        expires_unix_s = math.inf if token.expires is None else token.expires.timestamp()
        tokens[digest] = StaticToken(digest=digest, tenant=name, expires_unix_s=expires_unix_s)
