"""Validates JSON Web Tokens that are sent as bearer tokens, and returns their tenant.

Validates them by RFC 7519 and RFC 8725, decides which public keys of a JWKS file (RFC 7517) are
accepted, and caches valid tokens. PyJWT is imported when the first key set is read; the extra `jwt`
installs it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.conventions.extras import requires_extra
from penstock.server.settings.json_values import parse_json

if TYPE_CHECKING:
    from jwt import PyJWK
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from penstock.server.security.policy import JwtPolicy
from penstock.server.tenants import tenant_fault

MAX_TOKEN_BYTES: Final = 8192
MAX_REMEMBERED: Final = 4096


MAX_KEYS: Final = 256
MIN_RSA_BITS: Final = 2048
_CURVES: Final = {("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}


class BadKeySet(ValueError):
    """The bytes are not a usable key set. The message quotes no key."""


class KeySet:
    """A set of public keys, by algorithm and key id."""

    def __init__(self, keys: Mapping[tuple[str, str], "PyJWK"]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, algorithm: str, key_id: str | None) -> "PyJWK | None":
        """Return the key with this algorithm and id; without an id, the only key with this
        algorithm.

        Returns None if there is no such key, or several keys and no id.
        """
        if key_id is not None:
            return self._keys.get((algorithm, key_id))
        found = [key for (of, _), key in self._keys.items() if of == algorithm]
        return found[0] if len(found) == 1 else None


def check_installed() -> None:
    """Raise ValueError if PyJWT or cryptography is not installed. The message names the extra."""
    try:
        import cryptography
        import jwt
    except ImportError:
        hint = requires_extra("jwt", "PyJWT or cryptography")
        raise ValueError(f"the validation of JSON Web Tokens {hint}") from None
    del cryptography, jwt


def read_key_set(data: bytes, algorithms: tuple[str, ...]) -> KeySet:
    """Return the public keys in the JWKS file `data` that verify signatures of one of `algorithms`.

    Keys of other types are ignored, as RFC 7517 recommends. Raises BadKeySet for an invalid file,
    for a file without such a key, and for a file with a shared secret or a private key.
    """
    try:
        root: Any = parse_json(data.decode("utf-8"))
    except ValueError:
        raise BadKeySet("is not JSON") from None
    listed: object = cast(dict[str, Any], root).get("keys") if isinstance(root, dict) else None
    if not isinstance(listed, list):
        raise BadKeySet("keys must be an array")
    entries = cast(list[object], listed)
    if len(entries) > MAX_KEYS:
        raise BadKeySet(f"keys must be at most {MAX_KEYS}")
    keys: dict[tuple[str, str], PyJWK] = {}
    for index, entry in enumerate(entries):
        where = f"keys[{index}]"
        if not isinstance(entry, dict):
            raise BadKeySet(f"{where} must be an object")
        jwk = cast(dict[str, Any], entry)
        algorithm = _algorithm(jwk, where)
        if algorithm not in algorithms:
            continue
        key_id = jwk.get("kid", "")
        if not isinstance(key_id, str):
            raise BadKeySet(f"{where}.kid must be a string")
        if (algorithm, key_id) in keys:
            raise BadKeySet(f"{where}.kid occurs twice for {algorithm}")
        keys[algorithm, key_id] = _key(jwk, algorithm, where)
    if not keys:
        raise BadKeySet(f"has no key for {', '.join(algorithms)}")
    return KeySet(keys)


def _algorithm(jwk: Mapping[str, Any], where: str) -> str | None:
    """Return the signature algorithm of a key; None if the key is of another type or not for
    verifying signatures. Raises BadKeySet for a shared secret or a private key."""
    kind = jwk.get("kty")
    if kind == "oct":
        raise BadKeySet(f"{where} is a shared secret, with which every verifier could sign")
    if "d" in jwk:
        raise BadKeySet(f"{where} is a private key, which belongs to the issuer alone")
    if jwk.get("use", "sig") != "sig":
        return None
    operations = jwk.get("key_ops")
    if operations is not None and "verify" not in operations:
        return None
    algorithm = "RS256" if kind == "RSA" else _CURVES.get((str(kind), str(jwk.get("crv"))))
    declared = jwk.get("alg", algorithm)
    # The name in RFC 9864.
    return algorithm if declared in (algorithm, jwk.get("crv")) else None


def _key(jwk: dict[str, Any], algorithm: str, where: str) -> "PyJWK":
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    try:
        key = PyJWK(jwk, algorithm)
    except (PyJWTError, ValueError, TypeError, KeyError):
        raise BadKeySet(f"{where} is not a key for {algorithm}") from None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        raise BadKeySet(f"{where} has {key.key.key_size} bits, at least {MIN_RSA_BITS} are wanted")
    return key


class BadToken(Exception):
    """The token is invalid. The message is for the log, and does not quote the token."""


@dataclass(frozen=True, slots=True)
class _VerifiedToken:
    tenant: str
    expires_unix_s: float


class WebTokens:
    """Validates tokens by one policy and one key set, and caches the valid ones. Thread-safe.
    `clock` returns the time of day in Unix seconds."""

    def __init__(self, policy: JwtPolicy, keys: KeySet, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._keys = keys
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        # The least recently used token is first. The threads of the metrics port share the cache.
        self._verified: OrderedDict[bytes, _VerifiedToken] = OrderedDict()
        self._lock = threading.Lock()

    def tenant_of(self, token: bytes) -> str:
        """Return the tenant of a token. Raises BadToken if the token is invalid."""
        # Hashed with a random key, so that the time of the look-up reveals nothing about other
        # tokens.
        place = blake2b(token, key=self._secret, digest_size=32).digest()
        with self._lock:
            known = self._verified.pop(place, None)
            if known is not None and self._clock() < known.expires_unix_s:
                self._verified[place] = known
                return known.tenant
        good = self._verify(token)
        with self._lock:
            self._verified[place] = good
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.popitem(last=False)
        return good.tenant

    def _verify(self, token: bytes) -> _VerifiedToken:
        from jwt import decode_complete, get_unverified_header
        from jwt.exceptions import PyJWTError

        if len(token) > MAX_TOKEN_BYTES:
            raise BadToken("a JSON Web Token that is too long")
        policy = self._policy
        try:
            header = get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            # No extension is supported here, so none may be critical (RFC 7515, 4.1.11).
            if algorithm not in policy.algorithms or "crit" in header:
                raise BadToken("a JSON Web Token with another algorithm or a critical extension")
            key = self._keys.find(algorithm, key_id)
            if key is None:
                raise BadToken("a JSON Web Token with an unknown key")
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
            raise BadToken(f"a JSON Web Token: {type(error).__name__}") from None
        except (ValueError, TypeError, RecursionError, OverflowError):
            raise BadToken("a JSON Web Token that cannot be read") from None
        return self._checked(claims)

    def _checked(self, claims: dict[str, Any]) -> _VerifiedToken:
        """Check the tenant and, against `clock`, the times in the claims; return the tenant and the
        expiry time plus `leeway_s`.

        Raises BadToken for an invalid claim.
        """
        policy, now_s = self._policy, self._clock()
        expires_s = _time(claims, "exp") + policy.leeway_s
        if not now_s < expires_s:
            raise BadToken("a JSON Web Token that has expired")
        if "nbf" in claims and _time(claims, "nbf") > now_s + policy.leeway_s:
            raise BadToken("a JSON Web Token that is not valid yet")
        tenant = claims.get(policy.tenant_claim)
        if not isinstance(tenant, str) or tenant_fault(tenant) is not None:
            raise BadToken("a JSON Web Token without a tenant")
        return _VerifiedToken(tenant, expires_s)


def _time(claims: dict[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadToken(f"a JSON Web Token whose {name} is not a time")
    try:
        time_s = float(value)
    except OverflowError:
        time_s = math.inf
    # Parsers accept NaN and Infinity, which JSON does not have. NaN would pass all comparisons, and
    # a token with Infinity would never expire.
    if not math.isfinite(time_s):
        raise BadToken(f"a JSON Web Token whose {name} is not a time")
    return time_s
