"""Quotas of a tenant's texts, charged before they are tokenised.

Owns this front's accounts of the limits per minute: every text that it tokenises is charged, also
of prompts that are refused afterwards and of calls that only tokenise. The engine's accounts, which
all fronts share, are charged for admitted requests (quota_accounts.py), so a tenant must meet both.
An account holds a minute's worth and fills at the rate of the limit, as the engine's do; it is
stored as the time at which it is full again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.scheduler.quotas import NO_QUOTA, QuotaBreach, QuotaKind, TenantQuota
from penstock.server.front.errors import ErrorReason, QuotaViolation, Refusal, RequestError
from penstock.server.front.failures import quota_subject, quota_violation
from penstock.server.text.errors import TooMuchText

_MINUTE_S: Final = 60.0
_ROUNDING_S: Final = 1e-6
_MAX_KEPT: Final = 1024


@dataclass(slots=True)
class _Account:
    """When each limit is full again, on the front's clock."""

    requests_full_s: float
    tokens_full_s: float


def _no_quota(tenant: str) -> TenantQuota:
    del tenant
    return NO_QUOTA


class TextQuotas:
    """The accounts of one front. `quota_of`: a tenant's current limits."""

    def __init__(
        self,
        quota_of: Callable[[str], TenantQuota] = _no_quota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quota_of = quota_of
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge one text of at least `num_tokens`; `settle` once they are known.

        Raises RequestError (QUOTA_EXCEEDED), without charging, where a limit is exceeded.
        """
        quota = self._quota_of(tenant)
        if quota.max_requests_per_minute is None and quota.max_tokens_per_minute is None:
            return
        now_s = self._clock()
        account = self._account(tenant, now_s)
        worst: QuotaBreach | None = None
        for kind, limit, count, full_s in (
            (
                QuotaKind.REQUESTS_PER_MINUTE,
                quota.max_requests_per_minute,
                1,
                account.requests_full_s,
            ),
            (
                QuotaKind.TOKENS_PER_MINUTE,
                quota.max_tokens_per_minute,
                max(num_tokens, 1),
                account.tokens_full_s,
            ),
        ):
            if limit is None:
                continue
            # More than a minute's worth waits for a full account.
            wait_s = max(full_s, now_s) + min(count, limit) * _MINUTE_S / limit - _MINUTE_S - now_s
            if wait_s > _ROUNDING_S and (worst is None or wait_s > (worst.retry_after_s or 0.0)):
                worst = QuotaBreach(kind=kind, limit=limit, retry_after_s=wait_s)
        if worst is not None:
            raise RequestError(
                Refusal(
                    reason=ErrorReason.QUOTA_EXCEEDED,
                    retry_after_s=worst.retry_after_s,
                    quota=quota_violation(tenant, worst),
                )
            )
        self._add(tenant, 1, num_tokens)

    def settle(self, tenant: str, num_tokens: int) -> None:
        """Charge the tokens beyond the lower bound; this may overdraw the account."""
        self._add(tenant, 0, num_tokens)

    def take_back(self, tenant: str, num_tokens: int) -> None:
        """Refund a charged text that is not tokenised."""
        self._add(tenant, -1, -num_tokens)

    def _add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        quota, now_s = self._quota_of(tenant), self._clock()
        account = self._account(tenant, now_s)
        if (most := quota.max_requests_per_minute) is not None:
            full_s = max(account.requests_full_s, now_s)
            account.requests_full_s = full_s + num_requests * _MINUTE_S / most
        if (most := quota.max_tokens_per_minute) is not None:
            full_s = max(account.tokens_full_s, now_s)
            account.tokens_full_s = full_s + num_tokens * _MINUTE_S / most

    def _account(self, tenant: str, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= _MAX_KEPT:
                self._accounts = {
                    name: kept
                    for name, kept in self._accounts.items()
                    if max(kept.requests_full_s, kept.tokens_full_s) > now_s
                }
            account = self._accounts[tenant] = _Account(now_s, now_s)
        return account


def refuse_waiting_text(tenant: str, error: TooMuchText) -> RequestError:
    """The error to raise where a tenant has too much text waiting to be tokenised."""
    return RequestError(
        Refusal(
            reason=ErrorReason.QUOTA_EXCEEDED,
            retry_after_s=error.retry_after_s,
            quota=QuotaViolation(
                subject=quota_subject(tenant),
                description=f"max_text_bytes_per_tenant is {error.max_bytes}",
            ),
        )
    )
