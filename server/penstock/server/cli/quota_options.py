"""The settings of `penstock serve` that limit what each tenant may use."""

from collections.abc import Mapping
from typing import Any

from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.server.cli.option import Option

QUOTA_OPTIONS = (
    Option(
        flag="tenant-max-live",
        parse=int,
        default=None,
        help="requests that each tenant may have waiting or running (default: no limit)",
    ),
    Option(
        flag="tenant-requests-per-minute",
        parse=int,
        default=None,
        help="requests of each tenant that are let in, in a minute (default: no limit)",
    ),
    Option(
        flag="tenant-tokens-per-minute",
        parse=int,
        default=None,
        help="tokens of each tenant's prompts and outputs, in a minute (default: no limit)",
    ),
)
QUOTA_FLAGS: Mapping[str, str] = {
    "max_num_live": "tenant-max-live",
    "max_requests_per_minute": "tenant-requests-per-minute",
    "max_tokens_per_minute": "tenant-tokens-per-minute",
}
"""By the field of `TenantQuota`."""


def tenant_quota(settings: Mapping[str, Any]) -> TenantQuota:
    """What each tenant may use. Raises ValueError naming a field, or a flag that has no meaning."""
    given = {field: settings[flag.replace("-", "_")] for field, flag in QUOTA_FLAGS.items()}
    quota = TenantQuota(**given)
    if quota != NO_QUOTA and settings["policy_file"] is not None:
        flag = next(QUOTA_FLAGS[field] for field, limit in given.items() if limit is not None)
        raise ValueError(f"{flag} means nothing with policy-file: limits are written there")
    return quota
