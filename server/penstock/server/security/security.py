"""Provides the authenticator and the TLS files of one process, and reloads them when they change.

The files are checked about once per second. Also rejects settings with which a port is reachable
from the network without credentials, unless another setting permits this.
"""

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from penstock.scheduler.setting import SettingError
from penstock.server.security.authenticator import Authenticator
from penstock.server.security.config import SecurityConfig
from penstock.server.security.policy import TenantPolicy
from penstock.server.security.policy_file import PolicyFile
from penstock.server.security.rights import ANONYMOUS, Caller
from penstock.server.security.tls_files import TlsFiles

logger = logging.getLogger(__name__)
POLL_S = 1.0


class Security:
    """The authenticator and the TLS files of a process; each is None if it is not configured.

    The constructor raises ValueError or OSError if a file is invalid. `is_behind_proxy` is True if
    a trusted proxy sends the tenant of each call: then there is no authenticator, and a policy file
    only sets rights and limits of tenants.
    """

    def __init__(self, config: SecurityConfig, *, is_behind_proxy: bool = False) -> None:
        self.tls = TlsFiles(config) if config.has_tls else None
        self.authenticator: Authenticator | None = None
        self._limits_behind_proxy: PolicyFile | None = None
        if config.policy_file is None:
            return
        if is_behind_proxy:
            self._limits_behind_proxy = PolicyFile(config.policy_file, is_behind_proxy=True)
            return
        self.authenticator = Authenticator(
            config.policy_file, has_client_certificates=config.tls_client_ca is not None
        )

    def proxy_caller(self, tenant: str) -> Caller:
        """Return the caller for a tenant sent by a proxy. `tenant` is NO_TENANT if the proxy sent
        none.

        The caller has the rights and maximum priorities that the policy file gives to the tenant.
        Without a policy file it has the rights and maximum priorities of ANONYMOUS.
        """
        if self._limits_behind_proxy is None:
            return dataclasses.replace(ANONYMOUS, tenant=tenant)
        return self._limits_behind_proxy.policy.tenant_policy(tenant).caller(tenant)

    def policy_of(self, tenant: str) -> TenantPolicy | None:
        """Return the policy of a tenant; None without a policy file."""
        file = self._limits_behind_proxy if self.authenticator is None else self.authenticator
        return None if file is None else file.policy.tenant_policy(tenant)

    def poll(self) -> None:
        """Reload all files that have changed; log errors. Blocks while it reads."""
        polls: list[Callable[[], object]] = []
        if self.tls is not None:
            polls.append(self.tls.poll)
        if self.authenticator is not None:
            polls.append(self.authenticator.poll)
        if self._limits_behind_proxy is not None:
            polls.append(self._limits_behind_proxy.poll)
        for poll in polls:
            try:
                poll()
            except Exception as error:
                # After any error the service continues with the old files.
                logger.exception("checking the security files failed: %s", type(error).__name__)

    async def poll_periodically(self, interval_s: float = POLL_S) -> None:
        """Call `poll` in a thread every `interval_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.poll)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`. For a name, this is the case if it
    resolves only to loopback addresses. Returns False for an unknown name."""
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
    """Return True if an address is loopback. Raises ValueError if it is invalid."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        # An IPv4-mapped IPv6 address (::ffff:127.0.0.1).
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
    """Raise SettingError if unauthenticated callers from the network could reach a port and no
    setting permits it.

    `operations_host` and `metrics_host` are None if that port is not opened. An unknown host is an
    error too. A tenant name sent by a proxy does not authenticate a caller. Mutual TLS
    authenticates callers on the gRPC ports, but not on the metrics port.
    """
    if config.allows_anonymous_network:
        return
    if config.policy_file is not None and not is_behind_proxy:
        return
    hosts = [("operations_host", metrics_host, "the metrics port")]
    if config.tls_client_ca is None:
        hosts = [
            ("host", host, "the service"),
            ("operations_host", operations_host, "the operations port"),
            *hosts,
        ]
    for name, address, port in hosts:
        if address is not None and not is_loopback(address):
            if not _is_known(address):
                raise SettingError(f"{{}}: there is no host {address!r}", name)
            raise SettingError(
                f"{{}} {address} is reachable from the network without credentials ({port}): set"
                " {} to a file with credentials, or {} to on if that is intended",
                *(name, "policy_file", "allow_anonymous_network"),
            )


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return True
