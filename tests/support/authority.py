"""A certificate authority that issues certificates for tests, and an issuer of JSON Web Tokens."""

import datetime
import functools
import ipaddress
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

DAY = datetime.timedelta(days=1)
ISSUER, AUDIENCE = "https://issuer.test", "penstock-test"


@functools.cache
def _rsa_key(_prefix: str) -> rsa.RSAPrivateKey:
    """Return the RSA key that all issuers with this prefix share, because generation is slow."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM bytes and as PEM files."""

    cert: bytes
    key: bytes
    cert_file: Path
    key_file: Path


@dataclass
class Authority:
    """Issues certificates for servers and clients. `ca_file`: the file with its own certificate,
    which peers trust.
    """

    folder: Path
    name: str = "test authority"
    _key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._subject = _name(self.name)
        own = self._build(self.name, self._key.public_key(), -DAY, DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.ca_file = self.folder / "ca.pem"
        self.ca_file.write_bytes(self.ca)

    def issue(self, name: str, *, is_expired: bool = False) -> Issued:
        """Issue a certificate with the common name `name`, for localhost and 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        start, end = (-3 * DAY, -DAY) if is_expired else (-DAY, DAY)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), address])
        cert = (
            self._build(name, key.public_key(), start, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )
        cert_file, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert_file.write_bytes(cert)
        key_file.write_bytes(pem)
        return Issued(cert, pem, cert_file, key_file)

    def _build(
        self, name: str, key: Any, start: datetime.timedelta, end: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + start)
            .not_valid_after(now + end)
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class TokenIssuer:
    """Issues JSON Web Tokens, with one key per algorithm: RS256, ES256, EdDSA. `jwks_file` has the
    public keys.
    """

    def __init__(self, folder: Path, *, prefix: str = "key") -> None:
        self.prefix = prefix
        self.keys: dict[str, Any] = {
            "RS256": _rsa_key(prefix),
            "ES256": ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate(),
        }
        self.jwks_file = folder / "keys.json"
        self.write()

    def jwks(self) -> dict[str, Any]:
        kinds: dict[str, Any] = {
            "RS256": RSAAlgorithm,
            "ES256": ECAlgorithm,
            "EdDSA": OKPAlgorithm,
        }
        entries: list[dict[str, Any]] = []
        for algorithm, key in self.keys.items():
            entry: dict[str, Any] = json.loads(kinds[algorithm].to_jwk(key.public_key()))
            entry.pop("key_ops", None)
            entries.append({**entry, "kid": f"{self.prefix}-{algorithm}", "alg": algorithm})
        return {"keys": entries}

    def write(self) -> None:
        replace_file(self.jwks_file, json.dumps(self.jwks()).encode())

    def token(
        self,
        algorithm: str = "ES256",
        *,
        headers: dict[str, Any] | None = None,
        now_s: float | None = None,
        **claims: Any,
    ) -> str:
        """Sign a token for tenant `acme`, valid for five minutes. `claims` override these; a claim
        that is None is omitted.
        """
        now_s = time.time() if now_s is None else now_s
        reported = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": now_s + 300, **claims}
        return jwt.encode(
            {name: value for name, value in reported.items() if value is not None},
            self.keys[algorithm],
            algorithm=algorithm,
            headers={"kid": f"{self.prefix}-{algorithm}", **(headers or {})},
        )


def replace_file(path: Path, data: bytes | str) -> None:
    """Replace a file atomically, with a new inode."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data.encode() if isinstance(data, str) else data)
    new.replace(path)
