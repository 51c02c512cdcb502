"""The public keys for JSON Web Tokens: a JWKS file (RFC 7517), read strictly.

Owns which keys are accepted. PyJWT is imported when the first key set is read: the extra `jwt`
installs it, and only `web_tokens` needs it besides.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.executor.config_json import parse_json

if TYPE_CHECKING:
    from jwt import PyJWK

MAX_KEYS: Final = 256
MIN_RSA_BITS: Final = 2048
_CURVES: Final = {("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}


class BadKeySet(ValueError):
    """The bytes are not a usable key set; the message quotes no key."""


class KeySet:
    """Keys by algorithm and id."""

    def __init__(self, keys: Mapping[tuple[str, str], "PyJWK"]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, algorithm: str, key_id: str | None) -> "PyJWK | None":
        """The key that a token names; without a name, the only one for its algorithm."""
        if key_id is not None:
            return self._keys.get((algorithm, key_id))
        found = [key for (of, _), key in self._keys.items() if of == algorithm]
        return found[0] if len(found) == 1 else None


def check_installed() -> None:
    """Raise ValueError naming the extra unless JSON Web Tokens can be verified here."""
    try:
        import cryptography
        import jwt
    except ImportError:
        raise ValueError(
            "JSON Web Tokens need the extra jwt: pip install 'penstock[jwt]'"
        ) from None
    del cryptography, jwt


def read_key_set(data: bytes, algorithms: tuple[str, ...]) -> KeySet:
    """The keys of a file that sign with one of `algorithms`. Raises BadKeySet.

    Keys of other types are ignored, as in the standard. Secrets are refused: shared ones, and
    private keys, which belong to the issuer alone.
    """
    try:
        root: Any = parse_json(data.decode("utf-8"))
    except ValueError:
        raise BadKeySet("is not JSON") from None
    listed: object = cast(dict[str, Any], root).get("keys") if isinstance(root, dict) else None
    if not isinstance(listed, list):
        raise BadKeySet("keys must be a list")
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
    """The algorithm of a key; None for one that cannot be used here."""
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
    said = jwk.get("alg", algorithm)
    # The name in RFC 9864.
    return algorithm if said in (algorithm, jwk.get("crv")) else None


def _key(jwk: dict[str, Any], algorithm: str, where: str) -> "PyJWK":
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    try:
        key = PyJWK(jwk, algorithm)
    except (PyJWTError, ValueError, TypeError, KeyError):
        raise BadKeySet(f"{where} is no key for {algorithm}") from None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        raise BadKeySet(f"{where} has {key.key.key_size} bits, at least {MIN_RSA_BITS} are wanted")
    return key
