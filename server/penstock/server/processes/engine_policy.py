"""Applies the policy file's limits and shares of tenants to the engine.

They are applied at the start and whenever the file has changed. Credentials and rights concern the
fronts.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.scheduler.quotas import TenantQuota
from penstock.server.security.policy_file import PolicyFile

log = logging.getLogger(__name__)


class LimitedEngine(Protocol):
    """The part of `penstock.scheduler.engine.Engine` that is used here. One thread calls it."""

    def set_quotas(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        """Replace the tenants' limits."""
        ...

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        """Replace the tenants' shares."""
        ...


class EnginePolicy:
    """Keeps an engine's limits equal to those of a policy file.

    `open_file` raises ValueError or OSError for an invalid file. With `can_wait` the error is
    logged and the file is read again at every poll: a restarted engine must not fail because the
    file is just being written. Until then no tenant is limited.
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
            # The message names the fault in the file; a traceback would not help.
            log.error("the policy file cannot be read, so no tenant is limited: %s", error)  # noqa: TRY400

    def poll(self) -> None:
        """Check whether the file has changed; on the engine's thread, between two steps."""
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
