"""The part of `penstock serve` that is about scheduling: order, tenants, deadlines, latency.

Owns how its flags are written and which of them need each other. What they mean, `SchedulerConfig`
knows.
"""

from collections.abc import Mapping
from typing import Any

from penstock.scheduler.config import (
    AdmissionPolicy,
    EvictionPolicy,
    SchedulerConfig,
    SchedulingOrder,
)
from penstock.server.cli.quota_options import tenant_quota
from penstock.server.cli.serve_options import told_by_flag
from penstock.server.cli.step_prices import read_step_prices
from penstock.server.front.tenants import tenant_fault

_FAIR_ONLY = (
    "tenant-weights",
    "aging-s",
    "max-num-running-per-tenant",
    "max-prefill-share",
)
_CACHE_ONLY = (
    "eviction",
    "session-ttl-s",
    "session-retention-priority",
    "max-session-share",
    "max-session-tokens",
    "max-retention-share",
    "max-tenant-retention-share",
    "max-retention-s",
    "share-prefixes-across-tenants",
)


def scheduler_config(
    settings: Mapping[str, Any],
    *,
    max_num_batched_tokens: int | None,
    admission_policy: str | None,
    is_prefix_caching: bool,
) -> SchedulerConfig:
    """The scheduler's settings; ValueError naming what is off.

    The three arguments are not taken from `settings` because an executor may have a word in them.
    """
    order = None if settings["order"] is None else SchedulingOrder(settings["order"])
    for flag in _FAIR_ONLY:
        if order is SchedulingOrder.FCFS and settings[_name(flag)] is not None:
            raise ValueError(f"{flag} means nothing to the order fcfs")
    if not is_prefix_caching:
        for flag in _CACHE_ONLY:
            if settings[_name(flag)] is not None:
                raise ValueError(f"{flag} means nothing without prefix caching")
    eviction = settings["eviction"]
    foresee, prices = settings["foresee_deadlines"], settings["step_prices"]
    if foresee == "off" and settings["min_deadline_chance"] is not None:
        raise ValueError("min-deadline-chance requires foresee-deadlines on")
    given = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "admission_policy": None if admission_policy is None else AdmissionPolicy(admission_policy),
        "max_num_waiting": settings["max_num_waiting"],
        "max_num_waiting_tokens": settings["max_num_waiting_tokens"],
        "max_num_waiting_per_tenant": settings["max_num_waiting_per_tenant"],
        "max_num_running_per_tenant": settings["max_num_running_per_tenant"],
        "watermark": settings["watermark"],
        "order": order,
        "tenant_weights": _tenant_weights(settings),
        "aging_s": settings["aging_s"],
        "max_prefill_share": settings["max_prefill_share"],
        "session_ttl_s": settings["session_ttl_s"],
        "session_retention_priority": settings["session_retention_priority"],
        "max_session_share": settings["max_session_share"],
        "max_session_tokens": settings["max_session_tokens"],
        "max_retention_share": settings["max_retention_share"],
        "max_tenant_retention_share": settings["max_tenant_retention_share"],
        "max_retention_s": settings["max_retention_s"],
        "eviction": None if eviction is None else EvictionPolicy(eviction),
        "target_itl_s": _target_itl_s(settings["target_itl_ms"]),
        "foresees_deadlines": None if foresee is None else foresee == "on",
        "min_deadline_chance": settings["min_deadline_chance"],
        "known_prices": (
            None if prices is None else read_step_prices("step-prices", prices, needs_all=True)
        ),
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        return SchedulerConfig(**chosen, tenant_quota=tenant_quota(settings))
    except ValueError as error:
        raise ValueError(told_by_flag(str(error))) from None


def _target_itl_s(target_ms: float | None) -> float | None:
    if target_ms is None:
        return None
    if not 0.0 < target_ms < float("inf"):
        raise ValueError(f"target-itl-ms must be finite and above 0, not {target_ms}")
    return target_ms / 1e3


def _tenant_weights(settings: Mapping[str, Any]) -> dict[str, float] | None:
    """`a=2,b=1`; an empty name is that of callers who name no tenant."""
    text: str | None = settings["tenant_weights"]
    if text is None:
        return None
    if settings["policy_file"] is not None:
        raise ValueError("tenant-weights means nothing with policy-file: weights are written there")
    if settings["tenant_metadata_key"] is None:
        raise ValueError("tenant-weights needs tenant-metadata-key: without it all are one tenant")
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, is_pair, weight = part.rpartition("=")
        fault = tenant_fault(name) if name else None
        if fault is not None:
            raise ValueError(f"tenant-weights: {name!r} is no name of a tenant: it {fault}")
        if name in weights:
            raise ValueError(f"tenant-weights: {name!r} is there twice")
        try:
            weights[name] = float(weight if is_pair else "")
        except ValueError:
            raise ValueError(
                f"tenant-weights must be NAME=WEIGHT,... with numbers, not {part!r}"
            ) from None
    return weights


def _name(flag: str) -> str:
    return flag.replace("-", "_")
