"""Reads the policy file of a service and the key set that it names (public keys for JSON Web
Tokens), and reloads them when they change.

An invalid file never replaces a valid one. The policy file is TOML and is parsed strictly. Errors
name the key (`tenants.acme.max_priority`) and the value, unless it is a credential. Unknown keys
are rejected, because a misspelt limit would have no effect. There is no timer: the caller must call
`poll` about once per second.
"""

import datetime
import logging
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, cast

from penstock.scheduler.setting import SettingError
from penstock.server.security.policy import JwtPolicy, Policy, StaticToken, TenantPolicy
from penstock.server.security.watched_file import FilesChanged, Stamp, read_together, stamp_of
from penstock.server.security.web_tokens import BadKeySet, KeySet, check_installed, read_key_set
from penstock.server.settings.json_values import TABLE, WrongKind, from_json_value
from penstock.server.tenants import tenant_fault

logger = logging.getLogger(__name__)
VERSION: Final = 1
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SECRET: Final = re.compile(r"\.tokens\b")
"""Matches the paths of values that may be credentials, which errors must not quote."""
_CERTIFICATE: Final = re.compile(r"(?:cn|dns|uri|email):\S(?:.*\S)?")


class PolicyFile:
    """A policy file, reloaded when it changes. The constructor raises ValueError or OSError if the
    file is invalid.

    Args:
        is_behind_proxy: True if a proxy sends the tenant of each call. The policy must then contain
            no credentials; otherwise it must contain some.
        has_client_certificates: True if TLS is mutual. Otherwise the policy must not contain names
            in certificates.
        needs_keys: If False, the constructor accepts a policy whose key set cannot be read, for a
            process that uses only the limits of the policy.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_behind_proxy: bool = False,
        has_client_certificates: bool = False,
        needs_keys: bool = True,
    ) -> None:
        self._path = path
        self._is_behind_proxy = is_behind_proxy
        self._has_client_certificates = has_client_certificates
        self._last_error = ""
        self._newer: Policy | None = None
        self._keys_stamp: Stamp = ()
        self.keys: KeySet | None = None
        self.policy, self._stamp = self._read()
        try:
            self.keys, self._keys_stamp = _read_keys(self.policy.jwt)
        except (ValueError, OSError) as error:
            if needs_keys:
                raise
            logger.error("the policy is in force without its keys: %s", error)  # noqa: TRY400 (in one line)

    def poll(self, apply: Callable[[], None] = lambda: None) -> bool:
        """Check whether a file has changed; return True if `policy` or `keys` were replaced.

        After a replacement, `apply` is called before the change is logged as in force.
        A missing or invalid file is logged once, and the old values are kept. A newer policy whose
        key set cannot be read is tried again at each call, because the key set may be written
        later. Meanwhile the keys of the current policy are still watched.
        """
        self._check()
        change = ("" if self._newer is None else self._replace(self._newer)) or self._poll_keys()
        if not change:
            return False
        apply()
        logger.info("%s", change)
        return True

    def _check(self) -> None:
        """If the policy file has changed, read it, and set `_newer` to its policy if that differs
        from the current one."""
        stamp = stamp_of((self._path,))
        if stamp == self._stamp:
            return
        try:
            newer, self._stamp = self._read()
        except FilesChanged:
            return
        except (ValueError, OSError) as error:
            self._stamp = stamp
            self._newer, self._last_error = None, ""
            self._report(error)
            return
        # After an invalid file, the file may contain the current policy again.
        self._newer, self._last_error = None if newer == self.policy else newer, ""

    def _replace(self, newer: Policy) -> str:
        """Replace the policy and its keys; return the log message, or "" if that is impossible."""
        try:
            keys, keys_stamp = _read_keys(newer.jwt)
        except FilesChanged:
            return ""
        except (ValueError, OSError) as error:
            self._report(error)
            return ""
        self.policy, self.keys, self._keys_stamp = newer, keys, keys_stamp
        self._newer, self._last_error = None, ""
        return f"a new policy is in force, with {len(newer.tenants)} tenants"

    def _poll_keys(self) -> str:
        """Read the key set again if it has changed; return the log message, or "" if `keys` are the
        old ones.
        """
        jwt = self.policy.jwt
        if jwt is None:
            return ""
        stamp = stamp_of((jwt.jwks_file,))
        if stamp == self._keys_stamp:
            return ""
        try:
            self.keys, self._keys_stamp = _read_keys(jwt)
        except FilesChanged:
            return ""
        except (ValueError, OSError) as error:
            self._keys_stamp = stamp
            logger.error("the old keys stay in force: %s", error)  # noqa: TRY400 (in one line)
            return ""
        return f"key set reloaded from {jwt.jwks_file}"

    def _report(self, error: Exception) -> None:
        if str(error) != self._last_error:
            self._last_error = str(error)
            logger.error("the old policy stays in force: %s", error)

    def _read(self) -> tuple[Policy, Stamp]:
        path = self._path
        try:
            (data,), stamp = read_together((path,))
            policy = parse_policy(data.decode("utf-8"), path.parent)
        except UnicodeDecodeError:
            raise BadPolicy(f"{path}: is not UTF-8") from None
        except BadPolicy as error:
            raise BadPolicy(f"{path}: {error}") from None
        fault = self._fault(policy)
        if fault is not None:
            raise BadPolicy(f"{path}: {fault}")
        return policy, stamp

    def _fault(self, policy: Policy) -> str | None:
        """Return why this service cannot use the policy; None if it can."""
        if self._is_behind_proxy:
            if not policy.has_credentials:
                return None
            return (
                "contains credentials, and tenant-metadata-key takes tenants from a proxy; they"
                " exclude each other"
            )
        if not policy.has_credentials:
            return "contains no credentials, so every call would be rejected"
        if policy.certificates and not self._has_client_certificates:
            tenant = next(iter(policy.certificates.values()))
            return f"tenants.{tenant}.certificates requires --tls-client-ca"
        return None


def _read_keys(jwt: JwtPolicy | None) -> tuple[KeySet | None, Stamp]:
    if jwt is None:
        return None, ()
    check_installed()
    (data,), stamp = read_together((jwt.jwks_file,))
    try:
        keys = read_key_set(data, jwt.algorithms)
    except BadKeySet as error:
        raise BadKeySet(f"{jwt.jwks_file}: {error}") from None
    return keys, stamp


class BadPolicy(ValueError):
    """The text is not a valid policy. The message has the place in the file and contains no
    secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    sha256: str
    expires: datetime.datetime | None = None

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.sha256):
            raise SettingError(
                "{} must be 64 of 0-9 and a-f (the hash, not the token); it has"
                f" {len(self.sha256)} characters",
                "sha256",
            )
        if self.expires is not None and self.expires.tzinfo is None:
            raise SettingError(
                "{} must be a time with its zone, such as 2027-01-31T00:00:00Z, not"
                f" {self.expires.isoformat()}",
                "expires",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant(TenantPolicy):
    tokens: tuple[_Token, ...] = ()
    certificates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        TenantPolicy.__post_init__(self)
        for index, name in enumerate(self.certificates):
            if not _CERTIFICATE.fullmatch(name):
                raise SettingError(
                    f"{{}}[{index}] must be cn:, dns:, uri: or email: and a name, not {name!r}",
                    "certificates",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    version: int
    default: TenantPolicy = field(default_factory=TenantPolicy)
    tenants: Mapping[str, _Tenant] = field(default_factory=dict[str, _Tenant])
    jwt: JwtPolicy | None = None

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise SettingError(
                f"{{}} must be {VERSION}, the only one of this release, not {self.version}",
                "version",
            )


def _parse(text: str) -> _File:
    """Parse the text and check each value. Raises BadPolicy."""
    try:
        content = _with_defaults(tomllib.loads(text))
        if "version" not in content:
            raise BadPolicy(f"version is missing: write version = {VERSION}")
        return from_json_value(_File, content, "", page="docs/security.md", is_toml=True)
    except tomllib.TOMLDecodeError as error:
        # The message has line and column, and quotes a single character at most.
        raise BadPolicy(f"is not TOML: {error}") from None
    except RecursionError:
        raise BadPolicy("is nested too deep") from None
    except WrongKind as error:
        is_secret = _SECRET.search(error.where)
        message = error.unquoted if is_secret else str(error)
        if error.wanted == TABLE and "[" not in error.where:
            message += f"; write [{error.where}]"
        raise BadPolicy(message) from None
    except ValueError as error:
        raise BadPolicy(str(error)) from None


def parse_policy(text: str, folder: Path) -> Policy:
    """Parse a policy. `folder` is the base of relative paths in it. Raises BadPolicy if it is
    invalid."""
    file = _parse(text)
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
    """Return the content of the file, in which keys that a tenant does not have are copied from the
    table `default`."""
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
