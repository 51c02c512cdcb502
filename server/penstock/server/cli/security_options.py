"""The settings of `penstock serve` that say who may call, and by what kind of connection.

Owns their table and the checks that need files, so that what is wrong with one is told before
anything starts.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.server.cli.option import Option
from penstock.server.logs.rate import ALWAYS

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig
    from penstock.server.security.config import SecurityConfig

SECURITY_OPTIONS = (
    Option(
        flag="policy-file",
        parse=str,
        default=None,
        metavar="FILE",
        help="TOML file with tenants, their rights, limits and credentials; docs/security.md has"
        " its keys (default: everybody may do everything)",
    ),
    Option(
        flag="tls-cert",
        parse=str,
        default=None,
        metavar="FILE",
        help="PEM file with the certificate chain of all ports; may be replaced at any time"
        " (default: plain text)",
    ),
    Option(flag="tls-key", parse=str, default=None, metavar="FILE", help="PEM file with its key"),
    Option(
        flag="tls-client-ca",
        parse=str,
        default=None,
        metavar="FILE",
        help="PEM file with authorities: clients must show a certificate of one (mutual TLS)",
    ),
    Option(
        flag="allow-anonymous-network",
        parse=str,
        default=None,
        choices=("on", "off"),
        help="whether callers from other machines may need no credentials (default: off)",
    ),
)

_FILES = ("policy_file", "tls_cert", "tls_key", "tls_client_ca")
_log = logging.getLogger(__name__)


def security_config(settings: Mapping[str, Any]) -> "SecurityConfig":
    """Of `serve`'s merged settings. Raises ValueError naming the field."""
    from penstock.server.security.config import SecurityConfig

    files = {name: _path(settings[name]) for name in _FILES}
    if settings["policy_file"] is not None and settings["tenant_weights"] is not None:
        raise ValueError("tenant_weights and policy_file exclude each other: a policy has weights")
    return SecurityConfig(
        **files, allows_anonymous_network=settings["allow_anonymous_network"] == "on"
    )


def check_security(config: "ServerConfig") -> None:
    """Raise ValueError where strangers would get in by accident, or a file cannot be used."""
    from penstock.server.security.exposure import check_exposure, is_loopback
    from penstock.server.security.security import Security

    security, observer = config.security, config.observer
    is_behind_proxy = bool(config.front.tenant_metadata_key)
    host = observer.operations_host
    check_exposure(
        security,
        host=config.host,
        operations_host=None if observer.operations_port is None else host,
        metrics_host=None if observer.metrics_port is None else host,
        is_behind_proxy=is_behind_proxy,
    )
    try:
        opened = Security(security, is_behind_proxy=is_behind_proxy)
    except OSError as error:
        raise ValueError(str(error)) from error
    if opened.authenticator is not None and not security.has_tls and not is_loopback(config.host):
        _log.warning(
            "tokens cross the network in plain text: give tls-cert and tls-key, or end TLS in front"
            " of %s",
            config.host,
            extra=ALWAYS,
        )


def _path(text: str | None) -> Path | None:
    # Not resolved: what Kubernetes mounts is a symlink, and its target is what changes.
    return None if text is None else Path(text).expanduser().absolute()
