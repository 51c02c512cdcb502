"""The security settings: the policy file, the TLS files, and whether callers from other machines
may call without credentials.

Defines the settings and their dependencies. Reads no files.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.scheduler.setting import SettingError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Settings of authentication and TLS. An invalid value raises SettingError, which names the
    field."""

    policy_file: Path | None = setting(
        None,
        "security",
        "TOML file with tenants, their rights, limits and credentials; docs/security.md has its"
        " keys",
        is_everyday=True,
        shown="none: no authentication",
    )
    tls_cert: Path | None = setting(
        None,
        "security",
        "PEM file with the certificate chain of all ports; may be replaced at any time",
        is_everyday=True,
        shown="none: plain text",
    )
    tls_key: Path | None = setting(
        None, "security", "PEM file with its key", is_everyday=True, shown="none"
    )
    tls_client_ca: Path | None = setting(
        None,
        "security",
        "PEM file with certificate authorities: clients need a certificate of one (mutual TLS)",
        shown="none",
    )
    allows_anonymous_network: bool = setting(
        False,
        "security",
        "whether callers from other machines may call without credentials",
        name="allow_anonymous_network",
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise SettingError("{} requires {}", given, missing)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SettingError("{} requires {}", "tls_client_ca", "tls_cert")

    @property
    def has_tls(self) -> bool:
        """True if all ports use TLS."""
        return self.tls_cert is not None
