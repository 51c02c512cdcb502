"""The authenticator and TLS files of one process, kept up to date.

Owns their composition, and the task that polls about once a second.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from penstock.server.security.authenticator import Authenticator
from penstock.server.security.config import SecurityConfig
from penstock.server.security.policy import TenantPolicy
from penstock.server.security.policy_file import PolicyFile
from penstock.server.security.rights import ANONYMOUS, Caller
from penstock.server.security.tls_files import TlsFiles

_log = logging.getLogger(__name__)
POLL_S = 1.0


class Security:
    """Authenticator and TLS files of a config, each None where there is none.

    Raises ValueError or OSError when a file is invalid at the start. `is_behind_proxy`: a proxy
    names the tenants, so that the policy has limits but does not authenticate.
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
        """A caller of this tenant as named by a proxy, or of NO_TENANT."""
        if self._limits_behind_proxy is None:
            return dataclasses.replace(ANONYMOUS, tenant=tenant)
        return self._limits_behind_proxy.policy.of(tenant).caller(tenant)

    def policy_of(self, tenant: str) -> TenantPolicy | None:
        """The policy of a tenant; None without a policy file."""
        file = self._limits_behind_proxy if self.authenticator is None else self.authenticator
        return None if file is None else file.policy.of(tenant)

    def poll(self) -> None:
        """Check all files once. Changed files are read, which takes a while."""
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
