"""The settings of security: which files, and whether strangers on the network are meant.

Owns the settings and which of them need each other. Reads no file.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Raises ValueError naming the field.

    `policy_file`: tenants, rights, limits and credentials; without it everybody may do everything.
    `tls_cert` and `tls_key`: PEM files with the chain and the key of the ports for gRPC; without
    them these speak plain text. `tls_client_ca`: clients must show a certificate that one of these
    has signed. `allows_anonymous_network`: whoever reaches an address beyond this machine may call,
    and that is meant.
    """

    policy_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    allows_anonymous_network: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise ValueError(f"{given} means nothing without {missing}")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca means nothing without tls_cert")

    @property
    def has_tls(self) -> bool:
        """Whether the ports for gRPC are encrypted."""
        return self.tls_cert is not None
