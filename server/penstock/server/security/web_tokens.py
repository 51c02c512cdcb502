"""JSON Web Tokens as bearer tokens: the tenant and the expiry.

Owns the validation (RFC 7519, RFC 8725) and the cache of valid tokens. PyJWT is imported when the
first token is checked; it is installed, because reading the keys needed it.
"""

import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from penstock.server.security.key_set import KeySet
from penstock.server.security.policy import JwtPolicy
from penstock.server.tenants import tenant_fault

MAX_TOKEN_BYTES: Final = 8192
MAX_REMEMBERED: Final = 4096


class BadToken(Exception):
    """The token is not valid. The message is for the log, and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class _Good:
    tenant: str
    expires_unix_s: float


class WebTokens:
    """Validates tokens by one policy and one key set. `clock`: the time of day, Unix seconds."""

    def __init__(self, policy: JwtPolicy, keys: KeySet, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._keys = keys
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        # Least recently used first. Threads of the metrics port share it.
        self._good: OrderedDict[bytes, _Good] = OrderedDict()
        self._lock = threading.Lock()

    def tenant_of(self, token: bytes) -> str:
        """The tenant of a token. Raises BadToken."""
        # Under a random key: the time of the look-up reveals nothing about other tokens.
        place = blake2b(token, key=self._secret, digest_size=32).digest()
        with self._lock:
            known = self._good.pop(place, None)
            if known is not None and self._clock() < known.expires_unix_s:
                self._good[place] = known
                return known.tenant
        good = self._judge(token)
        with self._lock:
            self._good[place] = good
            if len(self._good) > MAX_REMEMBERED:
                self._good.popitem(last=False)
        return good.tenant

    @property
    def num_remembered(self) -> int:
        """Tokens whose signature need not be verified again."""
        return len(self._good)

    def _judge(self, token: bytes) -> _Good:
        from jwt import decode_complete, get_unverified_header
        from jwt.exceptions import PyJWTError

        if len(token) > MAX_TOKEN_BYTES:
            raise BadToken("a web token that is too long")
        policy = self._policy
        try:
            header = get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            # No extension is supported here, so none may be critical (RFC 7515, 4.1.11).
            if algorithm not in policy.algorithms or "crit" in header:
                raise BadToken("a web token of another kind")
            key = self._keys.find(algorithm, key_id)
            if key is None:
                raise BadToken("a web token of an unknown key")
            claims: dict[str, Any] = decode_complete(
                token,
                key,
                algorithms=[algorithm],
                audience=policy.audience,
                issuer=policy.issuer,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )["payload"]
        except PyJWTError as error:
            raise BadToken(f"a web token: {type(error).__name__}") from None
        except (ValueError, TypeError, RecursionError, OverflowError):
            raise BadToken("a web token that cannot be read") from None
        return self._checked(claims)

    def _checked(self, claims: dict[str, Any]) -> _Good:
        """Check the times by our own clock; returns the tenant."""
        policy, now_s = self._policy, self._clock()
        expires_s = _time(claims, "exp") + policy.leeway_s
        if not now_s < expires_s:
            raise BadToken("a web token that has expired")
        if "nbf" in claims and _time(claims, "nbf") > now_s + policy.leeway_s:
            raise BadToken("a web token that is not valid yet")
        tenant = claims.get(policy.tenant_claim)
        if not isinstance(tenant, str) or tenant_fault(tenant) is not None:
            raise BadToken("a web token that names no tenant")
        return _Good(tenant, expires_s)


def _time(claims: dict[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadToken(f"a web token whose {name} is not a time")
    try:
        time_s = float(value)
    except OverflowError:
        time_s = math.inf
    # JSON has neither, but its parsers accept them: no bound catches NaN, and Infinity never
    # expires.
    if not math.isfinite(time_s):
        raise BadToken(f"a web token whose {name} is not a time")
    return time_s
