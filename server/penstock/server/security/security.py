"""The authenticator and TLS files of one process, kept up to date.

Owns their composition, the task that polls about once a second, and the rule that a port which is
reachable from the network needs credentials or an explicit setting.
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

_log = logging.getLogger(__name__)
POLL_S = 1.0


class Security:
    """Authenticator and TLS files of a config, each None if not configured.

    Raises ValueError or OSError if a file is invalid at the start. `is_behind_proxy`: a proxy names
    the tenants, so that the policy has limits but does not authenticate.
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

    def vouched_for(self, tenant: str) -> Caller:
        """Return a caller of this tenant as named by a proxy, or of NO_TENANT."""
        if self._limits_behind_proxy is None:
            return dataclasses.replace(ANONYMOUS, tenant=tenant)
        return self._limits_behind_proxy.policy.of(tenant).caller(tenant)

    def policy_of(self, tenant: str) -> TenantPolicy | None:
        """Return the policy of a tenant; None without a policy file."""
        file = self._limits_behind_proxy if self.authenticator is None else self.authenticator
        return None if file is None else file.policy.of(tenant)

    def poll(self) -> None:
        """Check all files once; reading changed files takes a while."""
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
                # On any error the service continues with the old files.
                _log.exception("checking the security files failed: %s", type(error).__name__)

    async def keep_up(self, interval_s: float = POLL_S) -> None:
        """Poll until cancelled, off the event loop."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.poll)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Names need loopback addresses only."""
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
    """Return whether an address is loopback. Raises ValueError if it is invalid."""
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
    """Raise SettingError if unauthenticated callers could reach a port without an explicit setting.

    A host of None: the port does not exist. A tenant named by a proxy is not authenticated; a
    certificate authenticates on the gRPC ports.
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
