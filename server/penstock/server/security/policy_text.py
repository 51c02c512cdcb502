"""The policy as people write it: TOML, read strictly.

Owns the form. Every complaint names the place (`tenants.acme.max_priority`) and quotes no value of
a credential; what is unknown is refused, because a misspelt limit is no limit.
"""

import datetime
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from penstock.scheduler.quotas import TenantQuota
from penstock.server.front.tenants import tenant_fault
from penstock.server.security.policy import JwtPolicy, Policy, StaticToken, TenantPolicy
from penstock.server.security.rights import Right

VERSION: Final = 1
MAX_POLICY_BYTES: Final = 4 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_CERTIFICATE: Final = re.compile(r"(?:cn|dns|uri|email):\S(?:.*\S)?")
_QUOTA_KEYS: Final = ("max_num_live", "max_requests_per_minute", "max_tokens_per_minute")
_LIMIT_KEYS: Final = ("rights", "max_priority", "max_retention_priority", "weight", *_QUOTA_KEYS)
_CREDENTIAL_KEYS: Final = ("tokens", "certificates")
_JWT_KEYS: Final = (
    *("jwks_file", "issuer", "audience", "tenant_claim", "algorithms", "leeway_s"),
    "takes_unlisted_tenants",
)
_Table = Mapping[str, Any]
T = TypeVar("T")


class BadPolicy(ValueError):
    """The text is no policy; the message names the place and holds no secret."""


def parse_policy(text: str, folder: Path) -> Policy:
    """The policy of a text; `folder` is where relative paths in it start. Raises BadPolicy."""
    try:
        root: _Table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Its message tells line and column, and quotes a single character at most.
        raise BadPolicy(f"is not TOML: {error}") from None
    except RecursionError:
        raise BadPolicy("is nested too deep") from None
    _check_keys(root, ("version", "default", "tenants", "jwt"), "")
    if _typed(root, "version", int, "", "an integer") != VERSION:
        raise BadPolicy(f"version must be {VERSION}: this release knows no other")
    default_table = _table(root, "default", "")
    _check_keys(default_table, _LIMIT_KEYS, "default")
    default = _limits(default_table, "default", TenantPolicy())
    tenants: dict[str, TenantPolicy] = {}
    tokens: dict[bytes, StaticToken] = {}
    certificates: dict[str, str] = {}
    listed = _table(root, "tenants", "")
    for name in listed:
        where = f"tenants.{name}" if name.isidentifier() else f"tenants.{name!r}"
        fault = tenant_fault(name)
        if fault is not None:
            raise BadPolicy(f"{where} is no name of a tenant: it {fault}")
        table = _table(listed, name, "tenants")
        _check_keys(table, (*_LIMIT_KEYS, *_CREDENTIAL_KEYS), where)
        tenants[name] = _limits(table, where, default)
        _add_tokens(table, where, name, tokens)
        _add_certificates(table, where, name, certificates)
    return Policy(
        default=default,
        tenants=tenants,
        tokens=tuple(tokens.values()),
        certificates=certificates,
        jwt=_jwt(_table(root, "jwt", ""), folder) if "jwt" in root else None,
    )


def _limits(table: _Table, where: str, default: TenantPolicy) -> TenantPolicy:
    rights = default.rights
    if "rights" in table:
        names = _strings(table, "rights", where)
        rights = frozenset(
            _right(name, f"{where}.rights[{index}]") for index, name in enumerate(names)
        )
    quota: dict[str, Any] = {}
    for key in _QUOTA_KEYS:
        quota[key] = getattr(default.quota, key)
        if key in table:
            quota[key] = _typed(table, key, int, where, "an integer")
    try:
        return TenantPolicy(
            rights=rights,
            max_priority=_optional(table, "max_priority", int, where, default.max_priority),
            max_retention_priority=_optional(
                table, "max_retention_priority", int, where, default.max_retention_priority
            ),
            weight=_number(table, "weight", where, default.weight),
            quota=TenantQuota(**quota),
        )
    except BadPolicy:
        raise
    except ValueError as error:
        raise BadPolicy(f"{where}.{error}") from None


def _right(name: str, where: str) -> Right:
    try:
        return Right(name)
    except ValueError:
        known = ", ".join(Right)
        raise BadPolicy(f"{where} must be one of {known}, not {name!r}") from None


def _add_tokens(table: _Table, where: str, tenant: str, tokens: dict[bytes, StaticToken]) -> None:
    for index, entry in enumerate(_list(table, "tokens", where)):
        place = f"{where}.tokens[{index}]"
        if not isinstance(entry, dict):
            # Most likely the token itself, so it is not quoted.
            raise BadPolicy(f'{place} must be a table, such as {{ sha256 = "..." }}')
        token = cast(_Table, entry)
        _check_keys(token, ("sha256", "expires"), place)
        text = _typed(token, "sha256", str, place, "a string")
        if not _DIGEST.fullmatch(text):
            raise BadPolicy(f"{place}.sha256 must be 64 of 0-9 and a-f: the hash, not the token")
        digest = bytes.fromhex(text)
        if digest in tokens:
            raise BadPolicy(f"{place}.sha256 is there twice: it would be two tenants' token")
        expires_unix_s = _expiry(token, place)
        tokens[digest] = StaticToken(digest=digest, tenant=tenant, expires_unix_s=expires_unix_s)


def _expiry(token: _Table, where: str) -> float:
    if "expires" not in token:
        return math.inf
    at = token["expires"]
    if not isinstance(at, datetime.datetime) or at.tzinfo is None:
        raise BadPolicy(f"{where}.expires must be a time with its zone: 2027-01-31T00:00:00Z")
    return at.timestamp()


def _add_certificates(table: _Table, where: str, tenant: str, certificates: dict[str, str]) -> None:
    if "certificates" not in table:
        return
    for index, name in enumerate(_strings(table, "certificates", where)):
        place = f"{where}.certificates[{index}]"
        if not _CERTIFICATE.fullmatch(name):
            raise BadPolicy(f"{place} must be cn:, dns:, uri: or email: and a name")
        if name in certificates:
            raise BadPolicy(f"{place} is there twice: {name!r}")
        certificates[name] = tenant


def _jwt(table: _Table, folder: Path) -> JwtPolicy:
    where = "jwt"
    _check_keys(table, _JWT_KEYS, where)
    chosen: dict[str, Any] = {}
    for key in ("issuer", "audience"):
        chosen[key] = _typed(table, key, str, where, "a string")
    chosen["jwks_file"] = folder / _typed(table, "jwks_file", str, where, "a string")
    if "tenant_claim" in table:
        chosen["tenant_claim"] = _typed(table, "tenant_claim", str, where, "a string")
    if "algorithms" in table:
        chosen["algorithms"] = tuple(_strings(table, "algorithms", where))
    if "leeway_s" in table:
        chosen["leeway_s"] = _number(table, "leeway_s", where, 0.0)
    if "takes_unlisted_tenants" in table:
        key = "takes_unlisted_tenants"
        chosen[key] = _typed(table, key, bool, where, "true or false")
    try:
        return JwtPolicy(**chosen)
    except ValueError as error:
        raise BadPolicy(f"{where}.{error}") from None


def _check_keys(table: _Table, known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise BadPolicy(f"{_place(where, key)} is not known; there are {', '.join(known)}")


def _table(table: _Table, key: str, where: str) -> _Table:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise BadPolicy(f"{_place(where, key)} must be a table")
    return cast(_Table, value)


def _typed(table: _Table, key: str, kind: type[T], where: str, wanted: str) -> T:
    if key not in table:
        raise BadPolicy(f"{_place(where, key)} is required")
    value = table[key]
    # A bool is an int to Python, never to a reader of policies.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadPolicy(f"{_place(where, key)} must be {wanted}")
    return value


def _optional(table: _Table, key: str, kind: type[T], where: str, default: T) -> T:
    return _typed(table, key, kind, where, "an integer") if key in table else default


def _number(table: _Table, key: str, where: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadPolicy(f"{_place(where, key)} must be a number")
    return float(value)


def _list(table: _Table, key: str, where: str) -> list[object]:
    value: object = table.get(key, [])
    if not isinstance(value, list):
        raise BadPolicy(f"{_place(where, key)} must be a list")
    return cast(list[object], value)


def _strings(table: _Table, key: str, where: str) -> list[str]:
    values = _list(table, key, where)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise BadPolicy(f"{_place(where, key)}[{index}] must be a string")
    return cast(list[str], values)


def _place(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
