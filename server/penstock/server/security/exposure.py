"""Keeps a service from being exposed to a network by accident.

Owns the rule: a port that is reachable from the network needs credentials, or an explicit setting.
"""

import socket
from ipaddress import IPv6Address, ip_address

from penstock.server.security.config import SecurityConfig

FLAG = "allow-anonymous-network"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name must have loopback addresses alone."""
    try:
        return _is_loopback_address(host)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {str(entry[4][0]) for entry in found}
    return bool(addresses) and all(_is_loopback_address(address) for address in addresses)


def _is_loopback_address(text: str) -> bool:
    """Raises ValueError for an invalid address."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        # An IPv4 address as an IPv6 socket writes it (::ffff:127.0.0.1).
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def check_exposure(
    config: SecurityConfig,
    *,
    host: str,
    operations_host: str | None,
    metrics_host: str | None,
    is_behind_proxy: bool,
) -> None:
    """Raise ValueError where unauthenticated callers could reach a port without an explicit
    setting.

    A host that is None is a port that does not exist. A tenant that a proxy names proves nothing; a
    certificate does, on the gRPC ports.
    """
    if config.allows_anonymous_network:
        return
    if config.policy_file is not None and not is_behind_proxy:
        return
    ports = {"metrics-port": metrics_host}
    if config.tls_client_ca is None:
        ports = {"port": host, "operations-port": operations_host, **ports}
    for port, address in ports.items():
        if address is not None and not is_loopback(address):
            raise ValueError(
                f"{port}: {address} is reachable from the network without credentials: set"
                f" a policy-file with credentials, or set {FLAG} to on if that is intended"
            )
