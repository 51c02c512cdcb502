"""Quotas of a tenant: live requests, requests per minute, tokens per minute.

Owns the limits as one validated value, and the value that names an exceeded limit. Knows neither
the source of the limits nor their use (quota_accounts.py).
"""

import enum
from dataclasses import dataclass

from penstock.scheduler.setting import check, setting

MAX_QUOTA = 10**12
"""No limit may be larger: sums of tokens stay exact in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """The limits of one tenant, over all fronts together; None for no limit.

    A request of n outputs counts as n requests: each takes a slot and is generated separately.
    `max_num_live`: requests that wait or run. `max_requests_per_minute`: admitted requests.
    `max_tokens_per_minute`: tokens of prompts, charged at admission, and of outputs, charged as
    they are generated.

    Raises SettingError, which names the field, for a limit that is not in 1..MAX_QUOTA.
    """

    max_num_live: int | None = setting(
        None,
        "tenants",
        "waiting and running requests of each tenant",
        name="tenant_max_live",
        at_least=1,
        at_most=MAX_QUOTA,
        shown="no limit",
    )
    max_requests_per_minute: int | None = setting(
        None,
        "tenants",
        "admitted requests of each tenant per minute",
        name="tenant_requests_per_minute",
        at_least=1,
        at_most=MAX_QUOTA,
        shown="no limit",
    )
    max_tokens_per_minute: int | None = setting(
        None,
        "tenants",
        "tokens of each tenant's prompts and outputs per minute",
        name="tenant_tokens_per_minute",
        at_least=1,
        at_most=MAX_QUOTA,
        shown="no limit",
    )

    def __post_init__(self) -> None:
        check(self)


NO_QUOTA = TenantQuota()
"""No limits."""


class QuotaKind(enum.IntEnum):
    """The limits of a tenant."""

    NUM_LIVE = 1
    """`TenantQuota.max_num_live`."""
    REQUESTS_PER_MINUTE = 2
    TOKENS_PER_MINUTE = 3
    NUM_WAITING = 4
    """`SchedulerConfig.max_num_waiting_per_tenant`: one tenant's part of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaBreach:
    """Why a tenant's request is not admitted: the exceeded limit.

    `retry_after_s`: after it the request would be admitted if the tenant did nothing else, None
    where that depends on the end of its other requests.
    """

    kind: QuotaKind
    limit: int
    retry_after_s: float | None = None
