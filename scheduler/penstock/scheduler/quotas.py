"""What a tenant may use: how many requests at once, how many and how many tokens in a minute.

Owns the limits as one checked value, and the value that says which of them stood in the way. Knows
neither where the limits were written nor who has used what (quota_accounts.py).
"""

import enum
from dataclasses import dataclass, fields

MAX_QUOTA = 10**12
"""No limit may be larger: sums of tokens stay exact in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """The limits of one tenant, over all fronts together; None for no limit.

    `max_num_live`: requests that wait or run (a request of several outputs is one).
    `max_requests_per_minute`: requests let in. `max_tokens_per_minute`: tokens of prompts, counted
    when a request is let in, and of outputs, counted as they are made.

    Raises ValueError, which names the field, for a limit that is no whole number from 1 to
    MAX_QUOTA.
    """

    max_num_live: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            limit = getattr(self, item.name)
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, int):
                raise ValueError(f"{item.name} must be a whole number, not {limit!r}")
            if not 1 <= limit <= MAX_QUOTA:
                raise ValueError(f"{item.name} must be from 1 to {MAX_QUOTA}, not {limit}")


NO_QUOTA = TenantQuota()
"""Nothing is limited."""


class QuotaKind(enum.IntEnum):
    """Which limit of a tenant."""

    NUM_LIVE = 1
    """`TenantQuota.max_num_live`."""
    REQUESTS_PER_MINUTE = 2
    TOKENS_PER_MINUTE = 3
    NUM_WAITING = 4
    """`SchedulerConfig.max_num_waiting_per_tenant`: of the queue, one tenant's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaBreach:
    """Why a tenant's request is not let in: the limit that is used up.

    `retry_after_s`: from then on it would be let in if the tenant did nothing else, None where
    that hangs on when its other requests end.
    """

    kind: QuotaKind
    limit: int
    retry_after_s: float | None = None
