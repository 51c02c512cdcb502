"""What the policy file has for the engine: the tenants' limits and shares, as they are now.

Owns that they reach the engine, at the start and whenever the file has changed. Credentials and
rights are the fronts' matter.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.scheduler.quotas import TenantQuota
from penstock.server.security.policy_file import PolicyFile

log = logging.getLogger(__name__)


class LimitedEngine(Protocol):
    """What this needs of `penstock.scheduler.engine.Engine`. One thread calls it."""

    def set_quotas(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        """Replace the tenants' limits."""
        ...

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        """Replace the tenants' shares."""
        ...


class EnginePolicy:
    """Keeps an engine at what a policy file says; begins with what it says now.

    `open_file` raises ValueError or OSError for a file that is broken. With `can_wait` that is
    logged, and the file is tried again at every poll: an engine that replaces another must not
    stay away because somebody is just writing. Until then nobody's use is limited.
    """

    def __init__(
        self, engine: LimitedEngine, open_file: Callable[[], PolicyFile], *, can_wait: bool = False
    ) -> None:
        self._engine = engine
        self._open_file = open_file
        self._file: PolicyFile | None = None
        try:
            self._open()
        except (ValueError, OSError) as error:
            if not can_wait:
                raise
            # It says what is wrong with the file; where in our code is of no use to its writer.
            log.error("no tenant is limited until the policy can be read: %s", error)  # noqa: TRY400

    def poll(self) -> None:
        """Look whether the file has changed; on the engine's thread, between two steps."""
        if self._file is None:
            with contextlib.suppress(ValueError, OSError):
                self._open()
        elif self._file.poll():
            self._apply(self._file)

    def _open(self) -> None:
        file = self._open_file()
        self._apply(file)
        self._file = file

    def _apply(self, file: PolicyFile) -> None:
        policy = file.policy
        self._engine.set_quotas(policy.quotas, policy.default.quota)
        self._engine.set_weights(policy.weights, policy.default.weight)
