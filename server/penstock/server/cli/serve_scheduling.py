"""Settings of scheduling that need each other, or that another setting makes meaningless."""

from penstock.scheduler.config import SchedulingOrder
from penstock.server.settings.sources import Sources
from penstock.server.tenants import tenant_fault

_FAIR_ONLY = ("tenant_weights", "aging_s", "max_num_running_per_tenant", "max_prefill_share")
_CACHE_ONLY = (
    *("eviction", "session_ttl_s", "session_retention_priority", "max_session_share"),
    *("max_session_tokens", "max_retention_share", "max_tenant_retention_share"),
    *("max_retention_s", "share_prefixes_across_tenants"),
)
_QUOTAS = ("tenant_max_live", "tenant_requests_per_minute", "tenant_tokens_per_minute")


def check_scheduling(sources: Sources, *, is_caching: bool) -> None:
    """Raise ValueError for a setting that has no effect. `is_caching`: of prefixes."""
    if sources.get("order") is SchedulingOrder.FCFS:
        sources.refuse(_FAIR_ONLY, "means nothing to the order fcfs")
    if not (is_caching and sources.get("prefix_caching", True)):
        sources.refuse(_CACHE_ONLY, "means nothing without prefix caching")
    if not sources.get("foresee_deadlines", True):
        sources.refuse(["min_deadline_chance"], "requires --foresee-deadlines on")
    if "policy_file" in sources:
        sources.refuse(["tenant_weights"], "means nothing with --policy-file: it has the weights")
        sources.refuse(_QUOTAS, "means nothing with --policy-file: it has the limits")
    if "tenant_metadata_key" not in sources:
        sources.refuse(
            ["tenant_weights"], "needs --tenant-metadata-key: without it all are one tenant"
        )
    for name in sources.get("tenant_weights", {}):
        fault = tenant_fault(name) if name else None
        if fault is not None:
            spelling = sources.spell("tenant_weights")
            raise ValueError(f"{spelling}: {name!r} is no name of a tenant: it {fault}")
