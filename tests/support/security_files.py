"""A policy, an authority and a token issuer in a folder, for servers with authentication."""

import hashlib
from pathlib import Path

import grpc

from penstock.server.security.config import SecurityConfig
from penstock.server.security.security import Security
from support.authority import AUDIENCE, ISSUER, Authority, Issued, TokenIssuer, replace_file

ACME, OTHER, OPERATOR, VIEWER, MUTE = (
    f"{name}-Kanarie-token-0123456789" for name in ("acme", "other", "operator", "viewer", "mute")
)
ALL_TOKENS = (ACME, OTHER, OPERATOR, VIEWER, MUTE)
EXPIRED = "expired-Kanarie-token"


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


POLICY = f"""
version = 1
[tenants.acme]
max_priority = 5
tokens = [
    {{ sha256 = "{digest(ACME)}" }},
    {{ sha256 = "{digest(EXPIRED)}", expires = 2020-01-01T00:00:00Z }},
]
certificates = ["cn:acme"]
[tenants.other]
tokens = [{{ sha256 = "{digest(OTHER)}" }}]
[tenants.operator]
rights = ["inspect", "operations_read", "operations_write", "metrics"]
tokens = [{{ sha256 = "{digest(OPERATOR)}" }}]
[tenants.viewer]
rights = ["operations_read"]
tokens = [{{ sha256 = "{digest(VIEWER)}" }}]
[tenants.mute]
rights = []
tokens = [{{ sha256 = "{digest(MUTE)}" }}]
[jwt]
jwks_file = "keys.json"
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
"""


class SecurityFiles:
    """The files of a service with authentication: the authorities of servers and clients, the
    server's certificate, the policy and the keys of JSON Web Tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        self.clients = Authority(folder / "clients-ca", "clients' authority")
        self.issuer = TokenIssuer(folder)
        self.policy_file = folder / "policy.toml"
        self.policy_file.write_text(POLICY, encoding="utf-8")
        self.cert_file, self.key_file = folder / "tls.pem", folder / "tls.key"
        self.install(self.authority.issue("server"))

    def install(self, issued: Issued) -> None:
        replace_file(self.cert_file, issued.cert)
        replace_file(self.key_file, issued.key)

    def config(
        self, *, has_policy: bool = True, has_tls: bool = False, is_mutual: bool = False
    ) -> SecurityConfig:
        has_tls = has_tls or is_mutual
        return SecurityConfig(
            policy_file=self.policy_file if has_policy else None,
            tls_cert=self.cert_file if has_tls else None,
            tls_key=self.key_file if has_tls else None,
            tls_client_ca=self.clients.ca_file if is_mutual else None,
        )

    def tokens(self) -> Security:
        """Return a Security without TLS whose policy accepts tokens but no certificates; rewrites
        the policy file accordingly.
        """
        text = POLICY.replace('certificates = ["cn:acme"]\n', "")
        self.policy_file.write_text(text, encoding="utf-8")
        return Security(self.config())

    def channel_credentials(self, shown: Issued | None = None) -> grpc.ChannelCredentials:
        pair = () if shown is None else (shown.key, shown.cert)
        return grpc.ssl_channel_credentials(self.authority.ca, *pair)


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
