"""Checks of a service's configuration that need files, packages or other settings."""

import logging
from typing import TYPE_CHECKING

from penstock.scheduler.config import SchedulingOrder
from penstock.server.facades import NO_FACADE, load_facade
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.security.security import Security, check_exposure, is_loopback
from penstock.server.settings.sources import Sources
from penstock.server.tenants import tenant_fault

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig

_log = logging.getLogger(__name__)
_FAIR_ONLY = ("tenant_weights", "aging_s", "max_num_running_per_tenant", "max_prefill_share")
_CACHE_ONLY = (
    *("eviction", "session_ttl_s", "session_retention_priority", "max_session_share"),
    *("max_session_tokens", "max_retention_share", "max_tenant_retention_share"),
    *("max_retention_s", "share_prefixes_across_tenants"),
)
_QUOTAS = ("tenant_max_live", "tenant_requests_per_minute", "tenant_tokens_per_minute")


def check_security(config: "ServerConfig") -> None:
    """Raise ValueError where unauthenticated callers would get in by accident, or a file is
    invalid.
    """
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
            "tokens cross the network in plain text: set tls-cert and tls-key, or terminate TLS in"
            " front of %s",
            config.host,
            extra=ALWAYS,
        )


def check_facade(config: "ServerConfig") -> None:
    """Raise ValueError where a gateway's service cannot be served; warn where no gateway could call
    it.
    """
    if config.facade == NO_FACADE:
        return
    load_facade(config.facade).check_installed()
    security = config.security
    what = [
        *(["TLS"] if security.has_tls else []),
        *(["credentials"] if security.policy_file is not None else []),
    ]
    if config.num_fronts > 1:
        _log.warning(
            "the %s gateway keeps one connection to this worker, so one of its %d fronts gets all"
            " requests: --fronts 1 is enough here, and more workers add throughput",
            config.facade,
            config.num_fronts,
            extra=ALWAYS,
        )
    if what:
        _log.warning(
            "the port asks for %s and the %s gateway has none: it needs a separate proxy that"
            " adds them",
            " and ".join(what),
            config.facade,
            extra=ALWAYS,
        )


def check_scheduling(sources: Sources, *, is_caching: bool) -> None:
    """Raise ValueError for a setting that has no effect. `is_caching`: of prefixes."""
    if sources.get("order") is SchedulingOrder.FCFS:
        sources.refuse(_FAIR_ONLY, "has no effect with the order fcfs")
    if not (is_caching and sources.get("prefix_caching", True)):
        sources.refuse(_CACHE_ONLY, "requires prefix caching")
    if not sources.get("foresee_deadlines", True):
        sources.refuse(["min_deadline_chance"], "requires --foresee-deadlines on")
    if "policy_file" in sources:
        sources.refuse(
            ["tenant_weights"], "cannot be combined with --policy-file, which has the weights"
        )
        sources.refuse(_QUOTAS, "cannot be combined with --policy-file, which has the limits")
    if "tenant_metadata_key" not in sources:
        sources.refuse(
            ["tenant_weights"],
            "requires --tenant-metadata-key: without it there is only one tenant",
        )
    for name in sources.get("tenant_weights", {}):
        fault = tenant_fault(name) if name else None
        if fault is not None:
            spelling = sources.spell("tenant_weights")
            raise ValueError(f"{spelling}: {name!r} is not a valid tenant name: it {fault}")
