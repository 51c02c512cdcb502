"""What one process needs to judge its callers, and that it keeps up with its files.

Owns the composition, and the task that looks about once a second.
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

    Raises ValueError or OSError when a file cannot be used to begin with. `is_behind_proxy`: a
    proxy tells the tenants, so that the policy says what they may use and proves nobody.
    """

    def __init__(self, config: SecurityConfig, *, is_behind_proxy: bool = False) -> None:
        self.tls = TlsFiles(config) if config.has_tls else None
        self.authenticator: Authenticator | None = None
        self._told_by_proxy: PolicyFile | None = None
        if config.policy_file is None:
            return
        if is_behind_proxy:
            self._told_by_proxy = PolicyFile(config.policy_file, is_behind_proxy=True)
            return
        self.authenticator = Authenticator(
            config.policy_file, has_client_certificates=config.tls_client_ca is not None
        )

    def vouched_for(self, tenant: str) -> Caller:
        """A caller who is this tenant by the word of a proxy, or NO_TENANT in particular."""
        if self._told_by_proxy is None:
            return dataclasses.replace(ANONYMOUS, tenant=tenant)
        return self._told_by_proxy.policy.of(tenant).caller(tenant)

    def policy_of(self, tenant: str) -> TenantPolicy | None:
        """What the policy file has for a tenant; None without one."""
        file = self._told_by_proxy if self.authenticator is None else self.authenticator
        return None if file is None else file.policy.of(tenant)

    def poll(self) -> None:
        """Look at all files once. They are read when they have changed, which takes a while."""
        polls: list[Callable[[], object]] = []
        if self.tls is not None:
            polls.append(self.tls.poll)
        if self.authenticator is not None:
            polls.append(self.authenticator.poll)
        if self._told_by_proxy is not None:
            polls.append(self._told_by_proxy.poll)
        for poll in polls:
            try:
                poll()
            except Exception as error:
                # Whatever it is, the service goes on with what it has.
                _log.exception("a look at the files of security failed: %s", type(error).__name__)

    async def keep_up(self, interval_s: float = POLL_S) -> None:
        """Look again and again, off the event loop, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.poll)
